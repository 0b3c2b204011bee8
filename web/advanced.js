// Advanced inputs in the old page: hidden as in Nodes 2.0, until *Show Advanced* of the node's menu. The page has the
// menu and draws no advanced widget before, but leaves room for it.

const advanced = (node) => (node.widgets ?? []).filter(({ options }) => options?.advanced)

const isOld = () => !window.LiteGraph.vueNodesMode

const fit = (node) => node.setSize([node.size[0], node.computeSize()[1]])

// What is hidden must be as the node begins: a value that was changed, or comes through a link, is seen.
const isChanged = (node) => advanced(node).some((widget) => widget.value !== widget.first ||
  node.inputs?.some(({ widget: of, link }) => of?.name === widget.name && link != null))

export function hide (node) {
  if (!node.toggleAdvanced || !advanced(node).length) return // a page that has no such menu
  for (const widget of advanced(node)) {
    let hidden = widget.hidden
    widget.advanced = true
    widget.first = widget.value
    Object.defineProperty(widget, 'hidden', {
      get: () => hidden || (isOld() && !node.showAdvanced),
      set: (value) => { hidden = value },
      configurable: true,
      enumerable: true
    })
  }
  if (isOld()) fit(node)
}

// A node of a saved graph that was as high as all its widgets becomes as high as those that it shows.
export function restore (node) {
  if (!isOld() || !node.toggleAdvanced || !advanced(node).length) return
  node.showAdvanced = true
  const whole = node.computeSize()[1]
  node.showAdvanced = isChanged(node)
  if (!node.showAdvanced && node.size[1] <= whole + 4) fit(node)
}
