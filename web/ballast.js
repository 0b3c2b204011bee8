// In a Chinese page: what Ballast's nodes say while they run, its errors, and the notes of its templates.
// The server does not know the language of the page, so it speaks English, and the page translates.
// In any language: a node grows with what it says, as far as the page shows it, budgets are what is typed, and the old
// page hides advanced inputs, too.
import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { hide, restore } from './advanced.js'
import { grow } from './grow.js'
import { translator } from './translate.js'

const LANGUAGES = ['zh']

const isOurs = (type) => String(type).startsWith('Ballast')

// The nodes of an execution id, outermost first: those of the subgraphs around a node, then itself, as in 3:7.
const path = (id) => String(id).split(':').reduce((found, own) =>
  [...found, (found.length ? found.at(-1)?.subgraph : app.rootGraph ?? app.graph)?.getNodeById(own)], [])

const isShown = (node) => node?.graph === app.canvas.graph

const said = new Map() // by execution id, what nodes in subgraphs have said last
let translate = (text) => text

// The page adds a widget for what a node says, in the graph that it shows only.
function show (node, heard, text) {
  const widget = node.widgets?.find(({ value }) => value === heard)
  if (!widget) return
  widget.value = text
  grow(node, widget)
}

function speak ({ detail: { nodeId, text } }) {
  const nodes = path(nodeId)
  const node = nodes.at(-1)
  if (!isOurs(node?.type)) return
  if (nodes.length > 1) said.set(nodeId, text)
  if (isShown(node)) show(node, text, translate(text))
  else speakAround(nodeId, nodes)
}

// A closed subgraph says what the nodes in it do, each behind its title.
function speakAround (nodeId, nodes) {
  const depth = nodes.findIndex(isShown)
  if (depth < 0) return
  const outer = String(nodeId).split(':').slice(0, depth + 1).join(':')
  const text = [...said].filter(([id]) => id.startsWith(outer + ':'))
    .map(([id, text]) => `${path(id).at(-1)?.title}: ${translate(/[.;]$/.test(text) ? text : text + '.')}`).join('\n')
  api.dispatchCustomEvent('progress_text', { nodeId: outer, text })
  show(nodes[depth], text, text)
}

// Says again, once a subgraph is open, what its nodes have said while it was closed.
function speakAgain () {
  for (const [nodeId, text] of said) {
    if (isShown(path(nodeId).at(-1))) api.dispatchCustomEvent('progress_text', { nodeId, text })
  }
}

// The page's own listeners have run: the text is in its widget, and the error is kept to be drawn.
function listen () {
  api.addEventListener('progress_text', speak)
  api.addEventListener('execution_error', ({ detail }) => {
    if (isOurs(detail.node_type)) detail.exception_message = translate(detail.exception_message)
  })
  app.canvas.canvas.addEventListener('litegraph:set-graph', () => setTimeout(speakAgain, 100)) // when the page knows it, too
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
    if (LANGUAGES.includes(language)) {
      const { messages, graphs } = await (await fetch(new URL(`./${language}.json`, import.meta.url))).json()
      translate = translator(messages)
      named = new Map(graphs)
    }
  },

  setup: listen,

  nodeCreated (node) {
    if (isOurs(node.comfyClass)) {
      exact(node)
      hide(node)
    }
    // Its lines are long.
    if (node.comfyClass === 'BallastVRAMReport') node.setSize([Math.max(420, node.size[0]), node.size[1]])
  },

  loadedGraphNode (node) {
    if (isOurs(node.comfyClass)) restore(node)
  },

  // Titles and notes of the templates, as long as nobody has changed them.
  beforeConfigureGraph (graph) {
    said.clear() // another graph has the same ids
    for (const node of graph.nodes ?? []) {
      if (named.has(node.title)) node.title = named.get(node.title)
      if (node.type !== 'MarkdownNote' || !named.has(node.widgets_values?.[0])) continue
      const said = named.get(node.widgets_values[0])
      node.widgets_values[0] = said
      if (node.widgets_values_named?.text) node.widgets_values_named.text = said
    }
  }
})
