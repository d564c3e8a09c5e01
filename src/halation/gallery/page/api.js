// Asks the server for JSON, names the URLs of images and listens for changes; in an exported page the answers are embedded.

const embeddedNode = document.getElementById("embedded");
const embedded = embeddedNode === null ? null : JSON.parse(embeddedNode.textContent);

/** True in a page written by `halation gallery --export`: nothing is live and there is no server. */
export const exported = embedded !== null;

/** What a request came back with when it was not an answer: status 0 is "no connection". */
class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function reasonOf(response) {
  try {
    const body = await response.json();
    return body.error ?? body.detail ?? response.statusText;
  } catch {
    return response.statusText;
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gallery does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await reasonOf(response));
  return response.json();
}

/** The JSON of "/api/..."; `options` may hold an AbortSignal as `signal`. */
export async function get(path, options) {
  if (!exported) return request(path, options);
  const plain = path.split("?")[0];
  const found = embedded.responses[path] ?? embedded.responses[plain];
  if (found === undefined) throw new ApiError(404, "This is not part of the exported page.");
  return found;
}

/** Asks for something to be done (only a gallery started with --allow_control answers). */
export async function post(path) {
  if (exported) throw new ApiError(405, "An exported page cannot control a run.");
  return request(path, { method: "POST" });
}

function pathOf(run, picture) {
  return `${encodeURIComponent(run)}/${encodeURIComponent(picture.key)}`;
}

/** URL of a thumbnail; `size` over 256 asks for the 512 one. */
export function thumb(run, picture, size) {
  if (exported) return embedded.pictures[`${run}/${picture.key}`] ?? "";
  const large = size > 256 ? "&s=512" : "";
  return `/thumbs/${pathOf(run, picture)}?v=${encodeURIComponent(picture.v ?? "")}${large}`;
}

/** URL of the image itself; in an export the file beside it, or the thumbnail where there is none. */
export function full(run, picture) {
  const name = `${run}/${picture.key}`;
  if (exported) return embedded.links?.[name] ?? embedded.pictures[name] ?? "";
  return `/pictures/${pathOf(run, picture)}?v=${encodeURIComponent(picture.v ?? "")}`;
}

/** What an export carries inside for an image ("" where it has none): shown where the linked file is not beside it. */
export function inside(run, picture) {
  return exported ? (embedded.pictures[`${run}/${picture.key}`] ?? "") : "";
}

/**
 * Runs `work` whenever it is asked to, one at a time and at most every `pauseMs` (a number, or a function that says); asking meanwhile runs it once more after.
 * Returns the function to ask with; its `.stop()` ends it.
 */
export function steadily(work, pauseMs) {
  let busy = false;
  let again = false;
  let timer = null;
  let last = -Infinity;
  let stopped = false;
  async function go() {
    timer = null;
    busy = true;
    again = false;
    last = performance.now();
    try {
      await work();
    } finally {
      busy = false;
      if (again && !stopped) trigger();
    }
  }
  function trigger() {
    if (stopped) return;
    if (busy) again = true;
    else if (timer === null) timer = setTimeout(go, Math.max(0, last + (typeof pauseMs === "function" ? pauseMs() : pauseMs) - performance.now()));
  }
  trigger.stop = () => {
    stopped = true;
    clearTimeout(timer);
  };
  return trigger;
}

const changeHandlers = new Set();
const statusHandlers = new Set();
let liveSource = null;
let liveStatus = exported ? "exported" : "connecting";
let liveBefore = false;

function tell(handlers, value) {
  for (const handler of [...handlers]) handler(value);
}

function setStatus(next) {
  if (liveStatus === next) return;
  liveStatus = next;
  tell(statusHandlers, liveStatus);
}

/** A server that was started anew has another token: no waiting helps then, and the reader is told. */
async function tryAgain() {
  try {
    await get("/api/state");
  } catch (error) {
    if (error.status === 403) {
      setStatus("locked");
      return;
    }
  }
  setTimeout(connect, 3000);
}

function connect() {
  liveSource = new EventSource("/api/events");
  liveSource.addEventListener("open", () => {
    setStatus("live");
    // Whatever happened while nobody listened is unknown: id "*" asks every view to look again.
    if (liveBefore) tell(changeHandlers, { id: "*", version: null });
    liveBefore = true;
  });
  liveSource.addEventListener("change", (event) => tell(changeHandlers, JSON.parse(event.data)));
  liveSource.addEventListener("error", () => {
    setStatus("reconnecting");
    // A refused stream is closed for good by the browser (a restarted server answers 403 or 502): try again ourselves.
    if (liveSource.readyState === EventSource.CLOSED) {
      liveSource = null;
      tryAgain();
    }
  });
}

/** handler({id, version}) on every change: id "" is the list of runs, "*" everything; returns a function that unsubscribes. */
export function onChange(handler) {
  if (exported) return () => {};
  changeHandlers.add(handler);
  if (liveSource === null && liveStatus === "connecting") connect();
  return () => changeHandlers.delete(handler);
}

/** handler("live" | "connecting" | "reconnecting" | "locked" | "exported"), now and at every change; returns a function that unsubscribes. */
export function onStatus(handler) {
  statusHandlers.add(handler);
  handler(liveStatus);
  return () => statusHandlers.delete(handler);
}
