// What the tests ask of the page from within it: `probes.NAME(...)`.

globalThis.probes = {
  /** Draws a text, and the same with more behind it: [source, markup] of each block. Each character of a piece must
   *  be the one at its place in the source. */
  async markdown(text) {
    const { blocks } = await import("/page/markdown.js");
    const draw = (source) =>
      blocks(source).map((block) => {
        const node = block.render((piece, positions) => {
          if (piece.length !== positions.length) throw new Error("a piece and its places differ");
          for (let i = 0; i < piece.length; i++) {
            if (source[positions[i]] !== piece[i]) throw new Error(`${JSON.stringify(piece)} is elsewhere`);
          }
          return [piece];
        });
        return [block.source, node.outerHTML, node.textContent];
      });
    return [draw(text), draw(`${text}\n\nmore`)];
  },

  /** Draws a text of one piece over and over; gives the length of what is shown. */
  async repeated(piece, times) {
    const { blocks } = await import("/page/markdown.js");
    const nodes = blocks(piece.repeat(times)).map((block) => block.render((text) => [text]));
    return nodes.reduce((sum, node) => sum + node.textContent.length, 0);
  },

  /** How many colours are on a canvas. */
  painted(canvas) {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) colours.add(data.slice(i, i + 3).join());
    return colours.size;
  },

  /** Texts with less contrast than 4.5 to 1 (WCAG 2, AA). */
  pale() {
    const channel = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const light = (colour) => {
      const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
      return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    };
    const behind = (element) => {
      for (; element; element = element.parentElement) {
        const colour = getComputedStyle(element).backgroundColor;
        if (!/, 0\)$/.test(colour)) return colour;
      }
      return "rgb(255, 255, 255)";
    };
    const found = [];
    for (const element of document.querySelectorAll("main *, header *")) {
      const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
      if (!hasText || !element.checkVisibility()) continue;
      const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
      const contrast = (a + 0.05) / (b + 0.05);
      if (contrast < 4.5) found.push(`${element.tagName}.${element.className}: ${contrast.toFixed(2)}`);
    }
    return found;
  },

  /** Controls and regions that a screen reader could not name. */
  nameless() {
    const named = (e) => e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim();
    const all = document.querySelectorAll("button, input, textarea, select, canvas, nav, aside, article");
    return [...all].filter((element) => !named(element)).map((element) => element.outerHTML);
  },

  /** Regions with more in them than fits their width. */
  tooWide() {
    const all = document.querySelectorAll("body, main, main > section, .column, .messages");
    return [...all].filter((e) => e.scrollWidth > innerWidth).map((e) => e.className || e.tagName);
  },

  /** Tries to reach another origin in every way; gives the directives that forbade it, in their order. */
  async reachElsewhere(url) {
    const found = [];
    document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
    await fetch(url).catch(() => {});
    navigator.sendBeacon(url);
    try {
      new WebSocket(url.replace("http", "ws"));
    } catch {
      // some browsers throw, some only tell of it
    }
    new FontFace("x", `url(${url})`).load().catch(() => {});
    for (const [tag, name] of [["img", "src"], ["iframe", "src"], ["link", "href"]]) {
      const element = document.createElement(tag);
      if (tag === "link") element.rel = "modulepreload";
      element[name] = url;
      document.body.append(element);
    }
    for (let i = 0; i < 100 && found.length < 7; i++) await new Promise((resolve) => setTimeout(resolve, 20));
    return found.sort();
  },

  fillStorage() {
    for (let n = 1 << 22; n >= 1; n >>= 1) {
      try {
        localStorage.setItem("full", (localStorage.getItem("full") ?? "") + "x".repeat(n));
      } catch {
        // that much does not fit: half of it may
      }
    }
  },

  conversations: () =>
    Object.keys(localStorage)
      .filter((name) => name.startsWith("kvasir.chat."))
      .map((name) => JSON.parse(localStorage[name])),

  conversation: () => probes.conversations()[0],
};
