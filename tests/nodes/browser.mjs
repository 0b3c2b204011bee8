// What a headless Chromium sees of ComfyUI's page: node browser.mjs URL LOCALE FOLDER PART...
// Does the parts in this order: templates run workflows layout subgraph typed advanced nodes graph. Prints one JSON object,
// leaves screenshots in FOLDER, where graph.json is what `graph` runs, in API format.
// CHROMIUM names the browser; playwright-core is found by NODE_PATH.
import { createRequire } from 'node:module'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'

const { chromium } = createRequire(import.meta.url)('playwright-core')
const [url, locale, folder, ...parts] = process.argv.slice(2)
const PACK = 'ComfyUI-Ballast'
const DEMO = '1 Demo without download or GPU'
const SECONDS = 1000

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

async function open () {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
      '--disable-component-update', '--disable-sync']
  })
  const context = await browser.newContext({ viewport: { width: 1600, height: 900 }, locale })
  const page = await context.newPage()
  await page.goto(url, { waitUntil: 'domcontentloaded' })
  await page.waitForFunction(
    () => window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 100,
    null, { timeout: 120 * SECONDS })
  await wait(1500)
  await page.keyboard.press('Escape') // the template browser, which opens on a first visit
  await wait(500)
  return { browser, page }
}

const shot = (page, name) => page.screenshot({ path: join(folder, `${locale}-${name}.png`) })

async function fit (page) {
  await page.evaluate(() => app.extensionManager.command.execute('Comfy.Canvas.FitView'))
  await wait(1000)
}

// The pack's cards in the template browser.
async function templates (page) {
  await page.evaluate(() => app.extensionManager.command.execute('Comfy.BrowseTemplates'))
  await page.getByText(PACK, { exact: true }).first().click({ timeout: 30 * SECONDS })
  await wait(2000)
  const names = await page.evaluate(() => [...document.querySelectorAll('[data-testid^="template-workflow-"]')]
    .map((card) => card.getAttribute('data-testid').replace('template-workflow-', '')))
  const pictures = await page.evaluate(() => [...document.querySelectorAll('[data-testid^="template-workflow-"] img')]
    .map((image) => image.complete && image.naturalWidth > 0))
  await shot(page, 'templates')
  return { names, pictures }
}

async function pick (page, name) {
  await page.getByTestId(`template-workflow-${name}`).click()
  await page.waitForFunction(() => app.graph._nodes.length > 0, null, { timeout: 30 * SECONDS })
  await wait(1500)
}

// Each workflow as the page opens it: nodes that are missing, and what the page says of them.
async function workflows (page, names) {
  const found = {}
  for (const name of names) {
    await page.evaluate(async ([pack, name]) => {
      const file = await fetch(`/api/workflow_templates/${pack}/${encodeURIComponent(name)}.json`)
      await app.loadGraphData(await file.json())
    }, [PACK, name])
    await wait(1500)
    found[name] = await page.evaluate(() => ({
      nodes: app.graph._nodes.length,
      missing: app.graph._nodes.filter((node) => !(node.type in LiteGraph.registered_node_types)).map((node) => node.type),
      failed: app.graph._nodes.filter((node) => node.has_errors).map((node) => node.type),
      unlinked: app.graph._nodes.flatMap((node) => (node.inputs ?? [])
        .filter((slot) => slot.link != null && !app.graph.links.get(slot.link)).map((slot) => `${node.type}.${slot.name}`)),
      said: document.querySelector('[role="dialog"]')?.innerText ?? ''
    }))
    await page.keyboard.press('Escape')
  }
  return found
}

// The titles of nodes that cover each other.
const overlaps = (page) => page.evaluate(() => {
  const boxes = app.graph._nodes.map((node) => [node.title, ...node.getBounding()])
  return boxes.flatMap(([one, x, y, w, h], i) => boxes.slice(i + 1)
    .filter(([, x2, y2, w2, h2]) => x < x2 + w2 && x2 < x + w && y < y2 + h2 && y2 < y + h).map(([other]) => [one, other]))
})

// Each template as a reader sees it: opened, then run on tiny models with previews on.
async function layout (page, names) {
  const found = {}
  for (const name of names) {
    await page.evaluate(async ([pack, name]) => {
      const file = await fetch(`/api/workflow_templates/${pack}/${encodeURIComponent(name)}.json`)
      await app.loadGraphData(await file.json())
    }, [PACK, name])
    await wait(1500)
    await page.keyboard.press('Escape')
    await fit(page)
    await shot(page, `open ${name}`)
    const zoom = await page.evaluate(() => app.canvas.ds.scale)
    const opened = { zoom, overlaps: await overlaps(page) }
    await page.evaluate(() => { // the models are tiny, and their configs do not come with the pack
      const edits = app.graph._nodes.some(({ widgets }) => widgets?.some(({ value }) => String(value).includes('image_edit')))
      for (const node of app.graph._nodes) {
        const files = node.widgets?.find(({ name }) => name === 'transformer')
        for (const widget of node.widgets ?? []) {
          if (['width', 'height'].includes(widget.name) && (widget.value > 128 || edits)) widget.value = 128
          if (widget.name === 'frames' && widget.value) widget.value = 9
          if (widget.name === 'steps') widget.value = 2
          if (widget.name !== 'base' || !files) continue // as `base_for` of the tests names it
          widget.value = 'tiny-' + files.value.split(/_?[0-9]/)[0] + (files.value.includes('_t2v') ? '_t2v' : '')
        }
      }
    })
    const ran = await execute(page, `ran ${name}`)
    found[name] = { opened, ran: { ...ran, cut: await cut(page) } }
  }
  return found
}

// What a closed subgraph says of the nodes in it, and what these say once it is opened: done, and failed.
async function subgraph (page) {
  await page.evaluate(async ([pack, name]) => {
    const file = await fetch(`/api/workflow_templates/${pack}/${encodeURIComponent(name)}.json`)
    await app.loadGraphData(await file.json())
    const inside = ['BallastLoadPipeline', 'BallastTextEncode', 'BallastSampler', 'BallastFreeVRAM']
    app.graph.convertToSubgraph(new Set(app.graph._nodes.filter(({ type }) => inside.includes(type))))
  }, [PACK, DEMO])
  await execute(page, 'subgraph closed')
  const closed = { done: await outer(page) }
  const done = await inner(page)
  await page.evaluate(() => {
    const { subgraph } = app.graph._nodes.find(({ subgraph }) => subgraph)
    subgraph._nodes.find(({ type }) => type === 'BallastSampler').widgets.find(({ name }) => name === 'denoise').value = 0.123
  })
  await execute(page, 'subgraph failed')
  closed.failed = await outer(page)
  return { closed, done, failed: await inner(page) }
}

// What the subgraph itself says, in one line.
const outer = (page) => page.evaluate(() => app.graph._nodes.find(({ subgraph }) => subgraph)
  .widgets.find(({ name }) => name.startsWith('$$node-text'))?.value.replace(/\s+/g, ' '))

// What the nodes in the subgraph say when it is opened, and closes it.
async function inner (page) {
  await page.evaluate(() => {
    const outer = app.graph._nodes.find(({ subgraph }) => subgraph)
    app.canvas.openSubgraph(outer.subgraph, outer)
  })
  await wait(2500)
  await fit(page)
  await shot(page, 'subgraph open')
  return page.evaluate(() => {
    const told = Object.fromEntries(app.canvas.graph._nodes.flatMap((node) => (node.widgets ?? [])
      .filter(({ name, value }) => name.startsWith('$$node-text') && value).map(({ value }) => [node.type, value])))
    app.canvas.setGraph(app.rootGraph ?? app.graph)
    return told
  })
}

// Pixels of what nodes say that are not shown, and how high the rest is.
const cut = (page) => page.evaluate(() => [...document.querySelectorAll('.dom-widget .overflow-y-auto')]
  .filter((box) => box.innerText.trim()).map((box) => [box.scrollHeight - box.clientHeight, box.clientHeight]))

// What the page keeps of an error: denoise without a latent.
async function fail (page) {
  const told = page.evaluate(async () => {
    const { api } = await import('/scripts/api.js')
    return new Promise((resolve) => api.addEventListener('execution_error', ({ detail }) =>
      setTimeout(() => resolve(detail.exception_message), 100)))
  })
  await page.evaluate(() => {
    const sampler = app.graph._nodes.find(({ type }) => type === 'BallastSampler')
    sampler.widgets.find(({ name }) => name === 'denoise').value = 0.5
    app.queuePrompt(0)
  })
  return told
}

// Runs what is open, and waits for the pictures that it shows.
async function execute (page, name) {
  const all = JSON.stringify({ unload_models: true, free_memory: true }) // a node whose output is cached says nothing
  await page.evaluate((body) => fetch('/api/free', { method: 'POST', body }), all)
  await wait(2000)
  await page.evaluate(() => app.queuePrompt(0))
  await wait(1000)
  const end = Date.now() + 300 * SECONDS
  let last = null
  while (!last && Date.now() < end) {
    await wait(500)
    const { queue_running: running, queue_pending: pending } = await page.evaluate(async () => (await fetch('/queue')).json())
    if (running.length || pending.length) continue
    const all = await page.evaluate(async () => Object.values(await (await fetch('/history?max_items=1')).json()))
    last = all[0]?.status.completed !== undefined ? all[0].status : null
  }
  await wait(4000) // messages go
  await page.waitForFunction(() => app.graph._nodes // previews arrive
    .every((node) => !['PreviewImage', 'SaveImage'].includes(node.type) || node.imgs?.length), null, { timeout: 30 * SECONDS })
    .catch(() => {}) // of a run that failed there are none
  await fit(page)
  await shot(page, name)
  const pictures = await page.evaluate(() => app.graph._nodes
    .filter((node) => node.imgs?.length)
    .map((node) => ({
      type: node.type,
      sizes: node.imgs.map((image) => [image.naturalWidth, image.naturalHeight]),
      colours: node.imgs.map((image) => {
        const canvas = Object.assign(document.createElement('canvas'), { width: 16, height: 16 })
        const pen = canvas.getContext('2d')
        pen.drawImage(image, 0, 0, 16, 16)
        const data = pen.getImageData(0, 0, 16, 16).data
        return new Set(Array.from({ length: 256 }, (_, i) => data.slice(4 * i, 4 * i + 3).join())).size
      })
    })))
  const texts = await page.evaluate(() => Object.fromEntries(app.graph._nodes
    .flatMap((node) => (node.widgets ?? []).filter(({ name, value }) => name.startsWith('$$node-text') && value)
      .map(({ value }) => [node.type, value]))))
  const zoom = await page.evaluate(() => app.canvas.ds.scale)
  return { status: last?.status_str ?? 'never ended', pictures, texts, zoom, overlaps: await overlaps(page) }
}

const heightsOf = (page) => page.evaluate(() => Object.fromEntries(app.graph._nodes.map(({ type, size }) => [type, size[1]])))

async function run (page) {
  const seen = await execute(page, 'demo')
  const heights = [await heightsOf(page)]
  await page.evaluate(() => app.loadGraphData(JSON.parse(JSON.stringify(app.graph.serialize()))))
  await wait(1500)
  await execute(page, 'demo again')
  heights.push(await heightsOf(page))
  const note = await page.evaluate(() => app.graph._nodes.find(({ type }) => type === 'MarkdownNote').widgets[0].value)
  return { ...seen, heights, note, error: await fail(page) }
}

// A graph of any nodes, run, and as a laptop shows it. With the pictures themselves.
async function graph (page) {
  const nodes = JSON.parse(readFileSync(join(folder, 'graph.json'), 'utf-8'))
  await page.evaluate((nodes) => app.loadApiJson(nodes, 'graph'), nodes)
  await wait(1500)
  await page.evaluate(() => { // as a user draws what is to be read
    for (const node of app.graph._nodes) {
      if (node.type === 'PreviewImage') node.setSize([560, 360])
    }
    app.graph.arrange()
  })
  const seen = await execute(page, 'graph')
  const shown = await page.evaluate(() => app.graph._nodes.filter((node) => node.imgs?.length).map((node) => {
    const [image] = node.imgs
    const canvas = Object.assign(document.createElement('canvas'), { width: image.naturalWidth, height: image.naturalHeight })
    canvas.getContext('2d').drawImage(image, 0, 0)
    return canvas.toDataURL('image/png')
  }))
  await page.setViewportSize({ width: 1366, height: 768 })
  await wait(500)
  await fit(page)
  await shot(page, 'graph-laptop')
  const laptop = await page.evaluate(() => app.canvas.ds.scale)
  const hidden = await cut(page)
  await page.evaluate(() => {
    const node = app.graph._nodes.find(({ type }) => type === 'BallastVRAMReport')
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [300 - node.pos[0], 200 - node.pos[1]]
    app.canvas.setDirty(true, true)
  })
  await wait(800)
  await shot(page, 'report-laptop')
  return { ...seen, shown, cut: hidden, laptop }
}

// What the page makes of gigabytes: it rounds what is typed in the widget's callback.
const typed = (page) => page.evaluate(() => {
  const found = {}
  for (const [type, name] of [['BallastLoadPipeline', 'vram_gb'], ['BallastLoadPipeline', 'ram_gb'], ['BallastVramBudget', 'vram_gb']]) {
    const node = LiteGraph.createNode(type)
    const widget = node.widgets.find((each) => each.name === name)
    found[`${type}.${name}`] = [7.25, 0.004].map((value) => {
      widget.value = value
      widget.callback(value, app.canvas, node)
      return widget.value
    })
  }
  return found
})

// Widgets that the old page shows: of new nodes, by their menu, of a graph saved so, and of one with a changed value.
async function advanced (page) {
  const shown = () => page.evaluate(() => Object.fromEntries(app.graph._nodes.map((node) => [node.type, {
    widgets: node.widgets.filter((widget) => node.isWidgetVisible(widget)).map(({ name }) => name),
    spare: node.size[1] - node.computeSize()[1]
  }])))
  const toggle = () => page.evaluate(() => app.graph._nodes.forEach((node) => node.toggleAdvanced()))
  const again = async () => {
    await page.evaluate(() => app.loadGraphData(JSON.parse(JSON.stringify(app.graph.serialize()))))
    await wait(1500)
  }
  await page.evaluate(() => {
    app.graph.clear()
    for (const type of ['BallastLoadPipeline', 'BallastSampler']) app.graph.add(LiteGraph.createNode(type))
  })
  await wait(500)
  const found = { fresh: await shown() }
  await toggle()
  found.toggled = await shown()
  await shot(page, 'advanced')
  await again()
  found.saved = await shown()
  await page.evaluate(() => {
    app.graph._nodes.find(({ type }) => type === 'BallastSampler').widgets.find(({ name }) => name === 'frames').value = 9
  })
  await again()
  found.changed = await shown()
  return found
}

// Every node of the pack as the page draws it: its names, and what its help panel says.
async function nodes (page) {
  const types = await page.evaluate(() => {
    app.graph.clear()
    const types = Object.keys(LiteGraph.registered_node_types).filter((type) => type.startsWith('Ballast'))
    types.forEach((type, i) => {
      const node = LiteGraph.createNode(type)
      app.graph.add(node)
      node.pos = [(i % 5) * 420, Math.floor(i / 5) * 520]
      node.setSize([380, node.computeSize()[1]])
    })
    return types
  })
  await fit(page)
  await shot(page, 'nodes')
  const found = {}
  for (const type of types) {
    found[type] = await page.evaluate((type) => {
      const node = app.graph._nodes.find((each) => each.type === type)
      const shown = (slot) => slot.label || slot.localized_name || slot.name
      const kind = node.constructor.nodeData
      return {
        title: node.title,
        description: kind.description,
        inputs: Object.fromEntries(node.inputs.map((slot) => [slot.name, shown(slot)])),
        widgets: Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.label ?? widget.name])),
        outputs: node.outputs.map(shown)
      }
    }, type)
    await page.evaluate((type) => {
      app.canvas.deselectAll()
      app.canvas.selectNode(app.graph._nodes.find((each) => each.type === type))
    }, type)
    await page.getByTestId('info-button').first().dispatchEvent('click') // it may lie below a panel
    const panel = page.locator('.node-help-content')
    await panel.waitFor({ timeout: 10 * SECONDS })
    await page.waitForFunction(() => document.querySelector('.node-help-content')?.innerText.trim(), null, { timeout: 10 * SECONDS })
    await wait(700)
    found[type].help = await panel.innerText()
  }
  await shot(page, 'help')
  return found
}

const { browser, page } = await open()
try {
  const seen = {}
  if (parts.includes('templates')) seen.templates = await templates(page)
  if (parts.includes('run')) {
    if (!seen.templates) await templates(page)
    await pick(page, DEMO)
    seen.run = await run(page)
  }
  if (parts.includes('workflows')) seen.workflows = await workflows(page, seen.templates.names)
  if (parts.includes('layout')) {
    if (!seen.templates) seen.templates = await templates(page)
    await page.keyboard.press('Escape')
    seen.layout = await layout(page, seen.templates.names)
  }
  if (parts.includes('subgraph')) seen.subgraph = await subgraph(page)
  if (parts.includes('typed')) seen.typed = await typed(page)
  if (parts.includes('advanced')) seen.advanced = await advanced(page)
  if (parts.includes('nodes')) seen.nodes = await nodes(page)
  if (parts.includes('graph')) seen.graph = await graph(page)
  console.log(JSON.stringify(seen))
} finally {
  await browser.close()
}
