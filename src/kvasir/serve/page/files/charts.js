// Draws charts on canvases, sharp on every screen and in the page's colours.

/** Clears a canvas; returns its context and its size in CSS pixels, or null while it is hidden. */
export function begin(canvas, height) {
  const width = canvas.clientWidth;
  if (!width) return null;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** A colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The colour of a row. Consecutive rows have distant hues. */
export function rowColour(row) {
  return `oklch(${colour("row-light")} 0.13 ${(40 + row * 137.508) % 360})`;
}

function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= value);
}

function axis({ context, width, height }, most, unit) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("muted");
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(height - 4 - part * (height - 20)) + 0.5;
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    if (part) context.fillText(`${(most * part).toLocaleString("en", { maximumSignificantDigits: 3 })}${unit}`, 2, y - 3);
  }
}

/** Draws lines over time: each series is `{colour, values: [[time, value]]}`; the last `span` seconds are shown. */
export function drawLines(canvas, series, now, span, unit) {
  const area = begin(canvas, 130);
  if (!area) return;
  const { context, width, height } = area;
  const most = roundUp(Math.max(1, ...series.flatMap((s) => s.values.map(([, v]) => v))));
  axis(area, most, unit);
  for (const { colour: name, values } of series) {
    context.strokeStyle = colour(name);
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.beginPath();
    for (const [time, value] of values) {
      context.lineTo(width - ((now - time) / span) * width, height - 4 - (value / most) * (height - 20));
    }
    context.stroke();
  }
}

/** Draws steps as bars, the newest at the right. The height is the duration, the lower part the share of decoding. */
export function drawSteps(canvas, steps) {
  const area = begin(canvas, 130);
  if (!area) return;
  const { context, width, height } = area;
  const wide = 4;
  const shown = steps.slice(-Math.floor(width / wide));
  const most = roundUp(Math.max(0.1, ...shown.map((s) => s.ms)));
  axis(area, most, " ms");
  shown.forEach((step, i) => {
    const x = width - (shown.length - i) * wide;
    const tall = Math.max(1, (step.ms / most) * (height - 20));
    const tokens = step.decode + step.prefill || 1;
    const low = tall * (step.decode / tokens);
    context.fillStyle = colour("prefill");
    context.fillRect(x, height - 4 - tall, wide - 1, tall - low);
    context.fillStyle = colour("decode");
    context.fillRect(x, height - 4 - low, wide - 1, low);
  });
}

// A cell of the block map is 2 * owner + (1 if it is in the prefix cache).
export const [FREE, PINNED, SHARED, FIRST_ROW] = [0, 1, 2, 3];
export const ownerOf = (cell) => cell >> 1;
export const isCached = (cell) => (cell & 1) === 1;

/** Draws the block map of a cache group. marked: the cell under the pointer. Returns the number of columns, and the
 *  size of a cell in pixels. */
export function drawBlocks(canvas, cells, marked = -1) {
  const width = canvas.clientWidth;
  if (!width || !cells.length) return null;
  const size = Math.max(5, Math.min(16, Math.floor(Math.sqrt((width * 220) / cells.length))));
  const columns = Math.max(1, Math.floor(width / size));
  const area = begin(canvas, Math.ceil(cells.length / columns) * size);
  if (!area) return null;
  const { context } = area;
  const colours = new Map();
  const paint = (cell) => {
    const owner = ownerOf(cell);
    if (owner >= FIRST_ROW) return rowColour(owner - FIRST_ROW);
    if (owner === SHARED) return colour("shared");
    if (owner === PINNED) return colour("pinned");
    return colour(isCached(cell) ? "cached" : "free");
  };
  cells.forEach((cell, i) => {
    const x = (i % columns) * size;
    const y = Math.floor(i / columns) * size;
    if (!colours.has(cell)) colours.set(cell, paint(cell));
    context.fillStyle = colours.get(cell);
    context.fillRect(x, y, size - 1, size - 1);
    if (ownerOf(cell) === PINNED) {
      const edge = Math.max(1, Math.floor(size / 6));
      context.fillStyle = colour("surface");
      context.fillRect(x + edge, y + edge, size - 1 - 2 * edge, size - 1 - 2 * edge);
    } else if (isCached(cell) && ownerOf(cell) !== FREE) {
      context.fillStyle = colour("surface");
      const dot = Math.max(2, Math.floor(size / 3));
      context.fillRect(x + (size - 1 - dot) / 2, y + (size - 1 - dot) / 2, dot, dot);
    }
  });
  if (cells[marked] !== undefined) {
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    context.strokeRect((marked % columns) * size, Math.floor(marked / columns) * size, size - 1, size - 1);
  }
  return { columns, size };
}
