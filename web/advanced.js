// Advanced inputs on the old page: hidden as in Nodes 2.0, until *Show Advanced* in the menu of the node. The page has
// that menu, but marks no widget as advanced, and leaves room for those that it does not draw.

const advanced = (node) => (node.widgets ?? []).filter(({ options }) => options?.advanced)

const isOld = (node) => !window.LiteGraph.vueNodesMode && node.toggleAdvanced && node.getLayoutWidgets

const fit = (node) => node.setSize([node.size[0], node.computeSize()[1]])

// A value that was changed, or comes through a link, is seen.
const isChanged = (node) => advanced(node).some((widget) => widget.value !== widget.first ||
  node.inputs?.some(({ widget: of, link }) => of?.name === widget.name && link != null))

export function hide (node) {
  if (!advanced(node).length || !node.getLayoutWidgets) return
  for (const widget of advanced(node)) {
    widget.advanced = true
    widget.first = widget.value
  }
  const all = node.getLayoutWidgets.bind(node)
  node.getLayoutWidgets = () => all().filter((widget) => !widget.options?.advanced || node.showAdvanced)
  if (isOld(node)) fit(node)
}

// A node of a saved graph that was as high as all its widgets becomes as high as those that it shows.
export function restore (node) {
  if (!isOld(node) || !advanced(node).length) return
  node.showAdvanced = true
  const whole = node.computeSize()[1]
  node.showAdvanced = isChanged(node)
  if (!node.showAdvanced && node.size[1] <= whole + 4) fit(node)
}
