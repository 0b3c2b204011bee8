// Room for what a node says. The page gives it two lines, whatever the text, breaks it anywhere, and cuts the rest off.

// As the page draws it: 12 pixels high, 11 lines at most, and then with a bar to scroll.
const FONT = '12px Inter, Arial, sans-serif'
const LINE = 16
const LEAST = 58
const MOST = 220
const BESIDE = 60 // what margins take of the width
const AROUND = 38 // and of the height
const GAP = 4 // between two widgets
const TITLE = 50 // of a node, and a gap above it
// Words with the space behind them; Chinese breaks after every character, but never before a mark.
const WORDS = /(?:[\u2e80-\u2fff\u3003-\u9fff]|[^\s\u2e80-\u9fff\uff00-\uffef]+|[\uff00-\uffef\u3000-\u3002])[\uff00-\uffef\u3000-\u3002]*\s*|\s+/g

const GROWN = 'grown for text' // the property of a node that says by how many pixels
const grown = new WeakSet() // widgets that are so high already

let pen = null

// A text in lines as wide as the node: between words, not within one that fits a line.
export function lines (text, width) {
  pen ??= document.createElement('canvas').getContext('2d')
  pen.font = FONT
  const room = Math.max(1, width - BESIDE)
  return String(text).split('\n').flatMap((paragraph) => {
    const found = ['']
    for (const word of paragraph.match(WORDS) ?? []) {
      const longer = found.at(-1) + word
      if (found.at(-1) && pen.measureText(longer.trimEnd()).width > room) found.push(word)
      else found[found.length - 1] = longer
    }
    return found.map((line) => line.trimEnd())
  })
}

const height = (text, width) => Math.min(MOST, Math.max(LEAST, AROUND + LINE * lines(text, width)
  .reduce((sum, line) => sum + Math.max(1, Math.ceil(pen.measureText(line).width / Math.max(1, width - BESIDE))), 0)))

// How much higher a node may be before it covers the next one below it.
function spare (node) {
  const [x, y] = node.pos
  const tops = node.graph.nodes.filter((other) => other !== node && other.pos[1] > y &&
    other.pos[0] < x + node.size[0] && x < other.pos[0] + other.size[0]).map((other) => other.pos[1])
  return Math.max(0, Math.min(...tops) - TITLE - y - node.size[1])
}

// What a node with prompts has beyond its least, without text and what it grew by for text. The page would give the text
// a share of it. A saved graph comes back without its text, in nodes that had grown for it.
function own (node, textHigh) {
  if (!node.widgets.some(({ element }) => element?.tagName === 'TEXTAREA')) return 0
  return Math.max(0, node.size[1] - (node.properties?.[GROWN] ?? 0) - (node.computeSize()[1] - textHigh - GAP))
}

// A node never shrinks: what is below it would jump about while it runs.
export function grow (node, widget) {
  if (!widget.options) return
  const earlier = grown.has(widget) ? 0 : node.properties?.[GROWN] ?? 0
  grown.add(widget)
  const most = (widget.options.getMinHeight?.() ?? LEAST) + spare(node) + earlier
  const high = Math.min(most, height(widget.value, node.size[0]))
  widget.value = lines(widget.value, node.size[0]).join('\n')
  widget.options.getMinHeight = () => high
  const wanted = Math.min(node.computeSize()[1] + own(node, high), node.size[1] + spare(node))
  if (node.size[1] >= wanted) return
  node.properties[GROWN] = (node.properties[GROWN] ?? 0) + wanted - node.size[1]
  node.setSize([node.size[0], wanted])
}
