// Talks to the server: requests with the API key, errors with the server's message, and event streams.

import { key } from "./store.js";

/** A failed request. status: of the response, 0 if there was none. message: of the server's error object. */
export class Refused extends Error {
  /** seconds: to wait before a retry, if the server states them. code: of the error object. */
  constructor(status, message, seconds = null, code = null) {
    super(message);
    this.status = status;
    this.seconds = seconds;
    this.code = code;
  }

  /** The message, and what to do. */
  get words() {
    const { status, seconds } = this;
    const later = seconds ? `Try again in ${seconds} second${seconds === 1 ? "" : "s"}.` : "";
    const advice = status === 0 ? "Check that it is running, then try again." : later;
    return advice ? `${this.message}${/[.!?]$/.test(this.message) ? "" : "."} ${advice}` : this.message;
  }
}

const BROKEN = "The connection to the server was lost before the answer was complete.";

async function ask(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server is not responding.");
  }
  if (response.ok) return response;
  const { message, code } = await reason(response);
  throw new Refused(response.status, message, Number(response.headers.get("retry-after")), code);
}

/** The error is an object with a message in most dialects, and a text in Ollama's. */
async function reason(response) {
  try {
    const { error } = await response.json();
    return { message: error.message ?? String(error), code: error.code };
  } catch {
    return { message: `The server answered with status ${response.status}.` };
  }
}

async function json(response) {
  try {
    return await response.json();
  } catch {
    throw new Refused(0, "The server's response could not be read.");
  }
}

export const get = async (path) => json(await ask(path));
export const post = async (path, body) => json(await ask(path, { method: "POST", body: JSON.stringify(body) }));

/** Yields the events of a streaming POST up to its end marker. Throws Refused for an error event, and for a stream that
 *  ends early, since a partial answer must not look complete. */
export async function* stream(path, body, signal) {
  const response = await ask(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(500, chunk.error.message, null, chunk.error.code);
        yield chunk;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Refused) throw error;
    throw new Refused(0, BROKEN);
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Refused(0, BROKEN);
}
