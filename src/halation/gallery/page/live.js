// Hears from the server what has changed, and says whether it is being heard at all.

import { exported, get } from "./api.js";

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
