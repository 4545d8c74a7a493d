"use strict";
// The page of a run in progress requests itself again and replaces changed sections; the view stays as it was.
{
  const EVERY = 3000, note = document.getElementById("live");
  let version = null;
  const report = (text, live) => {
    note.setAttribute("aria-live", live);  // a screen reader announces troubles, not each time of day
    note.textContent = text;
  };
  const parts = section => [...section.querySelectorAll("th button, input, summary, .scroll")].map(part => {
    const head = part.closest("[aria-sort]"), around = part.closest(".scroll");
    return { part, name: `${around && around.getAttribute("aria-label")} ${part.tagName} ${part === around ? "" : part.textContent}`,
             focus: part === document.activeElement, left: part.scrollLeft, text: part.value,
             clicks: head ? 1 + (head.getAttribute("aria-sort") === "descending") : 0 };
  });

  const take = text => {
    const fresh = new DOMParser().parseFromString(text, "text/html"), data = fresh.getElementById("data");
    if (!data || fresh.querySelectorAll("main > section").length !== document.querySelectorAll("main > section").length) {
      location.reload();  // sections were added or removed
      return;
    }
    ({ runs, curves, statistics } = JSON.parse(data.textContent));
    for (const old of document.querySelectorAll("main > section:not(#curves, #statistics)")) {
      const section = fresh.getElementById(old.id);
      if (!section || old.dataset.text === section.textContent) continue;
      const open = [...old.querySelectorAll("details")].map(part => part.open), before = new Map(parts(old).map(one => [one.name, one]));
      section.querySelectorAll("details").forEach((part, i) => { part.open = open[i]; });
      old.replaceChildren(...document.adoptNode(section).childNodes);
      old.dataset.text = old.textContent;
      old.querySelectorAll("table.sortable").forEach(sortable);
      if (old.id === "table") filterable(old);
      for (const { part, name } of parts(old)) {  // words, order and focus stay as they were
        const was = before.get(name);
        if (!was) continue;
        if (part.matches("input")) {
          part.value = was.text;
          part.dispatchEvent(new Event("input"));
        }
        for (let i = 0; i < was.clicks; i++) part.click();
        part.scrollLeft = was.left;
        if (was.focus) part.focus({ preventScroll: true });
      }
    }
    show();
  };

  const poll = async () => {
    try {
      const answer = await fetch("/", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        take(await answer.text());
        report(`up to date at ${new Date().toLocaleTimeString()}`, "off");
      } else if (answer.status !== 304) report(`waiting: ${await answer.text()}`, "polite");
    } catch {
      report("normkit watch does not answer; it may have been stopped", "polite");
    }
    setTimeout(poll, EVERY);
  };
  setTimeout(poll, EVERY);
}
