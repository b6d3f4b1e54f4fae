// The tiles above the charts. /kvasir/info lists their numbers and forms; /kvasir/live has the values.

import { make } from "./dom.js";

/** How a number is shown, by its form; null if there is nothing to show. now, before: snapshots. */
const FORMS = {
  count: ({ stat }, now) => count(now.stats[stat]),
  rate: ({ stat }, now, before) => `${count(Math.round(rate(stat, now, before)))}/s`,
  share: ({ stat, of }, now) => part(now.stats[stat], now.stats[of]),
  growth: ({ stat, of }, now, before) => {
    const grown = (name) => now.stats[name] - before.stats[name];
    return grown(of) > 0 ? part(grown(stat), grown(of)) : null;
  },
  bytes: ({ stat }, now) => `${(now.stats[stat] / 2 ** 20).toFixed(0)} MiB`,
  median: ({ stat }, now) => span(now.latency[stat].p50),
  tail: ({ stat }, now) => tail(now.latency[stat]),
};

/** The tiles as elements. listed: the numbers of each tile, by its title. now, before: snapshots. */
export function drawTiles(listed, now, before) {
  const shown = Object.entries(listed).filter(([, numbers]) => numbers.some((n) => !n.optional || now.stats[n.stat]));
  return shown.map(([title, numbers]) => {
    const texts = numbers.map((n) => ({ ...n, shown: FORMS[n.form](n, now, before) })).filter((n) => n.shown !== null);
    const value = texts.filter((n) => !n.text).map((n) => n.shown);
    const details = texts.filter((n) => n.text).map((n) => n.text.replace("{}", n.shown));
    const small = make("dd", { class: "small muted" }, details.join(", "));
    return make("div", { class: "tile" }, make("dt", {}, title), make("dd", {}, value.join(", ")), small);
  });
}

/** The growth of a counter per second. */
export function rate(stat, now, before) {
  const seconds = now.now - before.now;
  return seconds > 0 ? (now.stats[stat] - before.stats[stat]) / seconds : 0;
}

export const count = (n) => n.toLocaleString("en");
export const part = (n, all) => (all ? `${((100 * n) / all).toFixed(n && n < all / 100 ? 1 : 0)} %` : "–");
const tail = ({ count, p95, p99 }) => (count ? `p95 ${span(p95)}, p99 ${span(p99)}` : "no measurements yet");

export function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
}
