// Room for what a node says. The page gives it two lines, whatever the text, and cuts the rest off.

// As the page draws it: 12 pixels high, broken anywhere, 11 lines at most, and then with a bar to scroll.
const FONT = '12px Inter, Arial, sans-serif'
const LINE = 16
const LEAST = 58
const MOST = 220
const BESIDE = 54 // what margins take of the width
const AROUND = 38 // and of the height
const TITLE = 50 // of a node, and a gap above it

let pen = null

export function height (text, width) {
  pen ??= document.createElement('canvas').getContext('2d')
  pen.font = FONT
  const lines = String(text).split('\n')
    .reduce((sum, line) => sum + Math.max(1, Math.ceil(pen.measureText(line).width / Math.max(1, width - BESIDE))), 0)
  return Math.min(MOST, Math.max(LEAST, AROUND + LINE * lines))
}

// How much higher a node may be before it covers the next one below it.
function spare (node, nodes) {
  const [x, y] = node.pos
  const tops = nodes.filter((other) => other !== node && other.pos[1] > y &&
    other.pos[0] < x + node.size[0] && x < other.pos[0] + other.size[0]).map((other) => other.pos[1])
  return Math.max(0, Math.min(...tops) - TITLE - y - node.size[1])
}

// A node never shrinks: what is below it would jump about while it runs.
export function grow (node, widget, nodes) {
  if (!widget.options) return
  const most = (widget.options.getMinHeight?.() ?? LEAST) + spare(node, nodes)
  widget.options.getMinHeight = () => Math.min(most, height(widget.value, node.size[0]))
  const wanted = node.computeSize()[1]
  if (node.size[1] < wanted) node.setSize([node.size[0], wanted])
}
