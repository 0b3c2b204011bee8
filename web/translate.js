// Known English sentences into another language. A table has pairs: a sentence with \u2026 for what is filled in, and
// its translation with $1, $2, ... for the same, which is translated in turn.

const HOLE = '\u2026'
const FILLED = '((?:(?!; |\\n|[.?!] [A-Z])[^])+?)' // part of one sentence

export function translator (pairs) {
  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')
  const patterns = pairs
    .map(([known, said]) => ({
      said,
      weight: known.replaceAll(HOLE, '').length,
      pattern: new RegExp(`^${known.split(HOLE).map(escaped).join(FILLED)}${known.endsWith('.') ? '' : '(?<!\\.)'}$`)
    }))
    .sort((one, other) => other.weight - one.weight) // the more a sentence says, the less it is taken for another

  function whole (text) {
    for (const { pattern, said } of patterns) {
      const found = text.match(pattern)
      if (found) return said.replace(/\$(\d)/g, (_, number) => part(found[number]))
    }
    return null
  }

  // What is filled in may be a sentence that has lost its full stop.
  function part (text) {
    const said = translate(text)
    if (said !== text) return said
    const sentence = translate(text + '.')
    return sentence.endsWith('\u3002') ? sentence.slice(0, -1) : text
  }

  // Each of the parts by itself; what is not known stays as it is.
  function parts (text, between, kept, joint) {
    const found = text.split(between)
    return found.map((part, i) => {
      const said = translate(part)
      return i === found.length - 1 ? said : said + (said === part ? kept : joint)
    }).join('')
  }

  function translate (text) {
    const said = whole(text)
    if (said !== null) return said
    if (text.includes('\n')) return parts(text, '\n', '\n', '\n')
    if (/[.?!] (?=[A-Z])/.test(text)) return parts(text, /(?<=[.?!]) (?=[A-Z])/, ' ', '')
    if (text.endsWith('.') && translate(text.slice(0, -1)) !== text.slice(0, -1)) {
      return translate(text.slice(0, -1)) + '\u3002'
    }
    if (text.includes('; ')) return parts(text, '; ', '; ', '\uff1b')
    return text
  }

  return translate
}
