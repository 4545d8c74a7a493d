"use strict";
// The page of a run in progress requests itself again and replaces changed sections; the view stays as it was.
{
  const EVERY = 3000, note = document.getElementById("live");
  let version = null;

  const take = text => {
    const fresh = new DOMParser().parseFromString(text, "text/html"), data = fresh.getElementById("data");
    if (!data || fresh.querySelectorAll("main > section").length !== document.querySelectorAll("main > section").length) {
      location.reload();  // sections were added or removed
      return;
    }
    ({ runs, curves, statistics } = JSON.parse(data.textContent));
    for (const old of document.querySelectorAll("main > section:not(#curves, #statistics)")) {
      const section = fresh.getElementById(old.id);
      if (!section || old.contains(document.activeElement) || old.dataset.text === section.textContent) continue;
      const open = [...old.querySelectorAll("details")].map(part => part.open);
      section.querySelectorAll("details").forEach((part, i) => { part.open = open[i]; });
      old.replaceChildren(...document.adoptNode(section).childNodes);
      old.dataset.text = old.textContent;
      old.querySelectorAll("table.sortable").forEach(sortable);
      if (old.id === "table") filterable(old);
    }
    show();
  };

  const poll = async () => {
    try {
      const answer = await fetch("/", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        take(await answer.text());
        note.textContent = `up to date at ${new Date().toLocaleTimeString()}`;
      } else if (answer.status !== 304) note.textContent = `waiting: ${await answer.text()}`;
    } catch {
      note.textContent = "normkit watch does not answer; it may have been stopped";
    }
    setTimeout(poll, EVERY);
  };
  setTimeout(poll, EVERY);
}
