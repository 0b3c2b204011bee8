// In a Chinese page: what Ballast's nodes say while they run, its errors, and the notes of its templates.
// The server does not know the language of the page, so it speaks English, and the page translates.
// In any language: a node grows with what it says, as far as the page shows it, and budgets are what is typed.
import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { grow } from './grow.js'
import { translator } from './translate.js'

const LANGUAGES = ['zh']

const isOurs = (type) => String(type).startsWith('Ballast')

// What a node says is in a widget that the page adds to it.
function saying (detail) {
  const node = app.graph.getNodeById(detail.nodeId)
  return { node, widget: isOurs(node?.type) && node.widgets?.find(({ value }) => value === detail.text) }
}

async function speak (language) {
  const { messages, graphs } = await (await fetch(new URL(`./${language}.json`, import.meta.url))).json()
  const translate = translator(messages)
  const named = new Map(graphs)

  // The page's own listeners have run: the text is in its widget, and the error is kept to be drawn.
  api.addEventListener('progress_text', ({ detail }) => {
    const { node, widget } = saying(detail)
    if (!widget) return
    widget.value = translate(detail.text)
    grow(node, widget, app.graph._nodes)
  })
  api.addEventListener('execution_error', ({ detail }) => {
    if (isOurs(detail.node_type)) detail.exception_message = translate(detail.exception_message)
  })

  return named
}

// The page rounds what is typed to the digits of the arrows' step: 7.25 GB to 7.3, and 0.004 to 0, which is no budget.
function exact (node) {
  for (const { name, options } of node.widgets ?? []) {
    if (!name.endsWith('_gb') || !options?.round) continue
    options.round = 0.001
    options.precision = 3
  }
}

let named = new Map()

app.registerExtension({
  name: 'ballast.language',

  async init () {
    const language = app.extensionManager.setting.get('Comfy.Locale')
    if (LANGUAGES.includes(language)) named = await speak(language)
    api.addEventListener('progress_text', ({ detail }) => {
      const { node, widget } = saying(detail)
      if (widget) grow(node, widget, app.graph._nodes)
    })
  },

  nodeCreated (node) {
    if (isOurs(node.comfyClass)) exact(node)
    // Its lines are long.
    if (node.comfyClass === 'BallastVRAMReport') node.setSize([Math.max(420, node.size[0]), node.size[1]])
  },

  // Titles and notes of the templates, as long as nobody has changed them.
  beforeConfigureGraph (graph) {
    for (const node of graph.nodes ?? []) {
      if (named.has(node.title)) node.title = named.get(node.title)
      if (node.type !== 'MarkdownNote' || !named.has(node.widgets_values?.[0])) continue
      const said = named.get(node.widgets_values[0])
      node.widgets_values[0] = said
      if (node.widgets_values_named?.text) node.widgets_values_named.text = said
    }
  }
})
