// What a reader has chosen (theme, sizes, orders), kept by the browser where it lets us.

const PREFIX = "halation.";

/** The value remembered under a name, or the fallback. */
export function recall(name, fallback) {
  try {
    const text = window.localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Remembers a value; a browser that keeps nothing (private windows, files) is fine too. */
export function remember(name, value) {
  try {
    window.localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    return;
  }
}
