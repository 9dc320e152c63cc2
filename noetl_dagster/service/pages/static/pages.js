// What the pages do beyond links and forms: live updates, times, dialogs, and parts that are fetched when asked for.
"use strict";

const pad = (number) => String(number).padStart(2, "0");

function showTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    element.title = `${element.dateTime.slice(0, 23).replace("T", " ")} UTC`;
    element.textContent =
      `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ` +
      `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  }
}

// Puts markup that the server rendered into an element. The focus stays on what has the same id or address.
function replace(element, html) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const opened = element.querySelector("dialog[open]");
  if (opened) return; // a person reads it
  element.innerHTML = html;
  showTimes(element);
  if (focused) {
    const same = focused.id
      ? document.getElementById(focused.id)
      : [...element.querySelectorAll("a[href], button")].find(
          (one) => one.tagName === focused.tagName && one.getAttribute("href") === focused.getAttribute("href"),
        );
    if (same) same.focus({ preventScroll: true });
  }
}

// Shows what is new in an execution. It asks every second while the page can be seen, with the place in the log up to
// which the page shows the execution: an answer that was lost is repeated.
function follow(address) {
  const state = document.getElementById("live");
  const place = new URL(address, location.href);
  const shown = {};
  const say = (name, text) => {
    if (!state) return;
    state.dataset.state = name;
    state.textContent = text;
  };
  const ask = async () => {
    try {
      const answer = await fetch(place, { headers: { accept: "application/json" } });
      if (!answer.ok || answer.redirected) throw new Error(`status ${answer.status}`);
      return await answer.json();
    } catch {
      return null;
    }
  };
  const again = async () => {
    const news = document.visibilityState === "visible" ? await ask() : undefined;
    if (news === null) say("lost", "connection lost, connecting again");
    if (news) {
      place.searchParams.set("position", news.position);
      for (const [id, html] of Object.entries(news.parts)) {
        const element = document.getElementById(id);
        if (element && shown[id] !== html) replace(element, html);
        shown[id] = html;
      }
      addRows(news.rows);
      say(...(news.ended ? ["ended", "ended"] : ["live", "live"]));
      if (news.ended || news.rows.includes("execution.resumed")) renew();
      if (news.ended) return;
    }
    setTimeout(again, 1000);
  };
  again();
}

// Fetches the page again for the parts that the updates do not contain: the buttons, the error and the checks.
async function renew() {
  const parts = document.querySelectorAll("[data-renew]");
  if (!parts.length) return;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } });
    if (!answer.ok || answer.redirected) return;
    const now = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of parts) replace(part, now.getElementById(part.id).innerHTML);
  } catch {
    // they are as they were
  }
}

// Adds rows of new events to the trail: at its end, or at its beginning if it shows the newest first.
function addRows(html) {
  const body = document.getElementById("trail");
  if (!body || !html) return;
  const added = document.createElement("template");
  added.innerHTML = html;
  const known = new Set([...body.rows].map((row) => row.dataset.event)); // the page may be ahead of the updates
  const rows = [...added.content.querySelectorAll("tr")].filter((row) => !known.has(row.dataset.event));
  const newestFirst = body.dataset.order === "newest";
  if (newestFirst) body.prepend(...rows.reverse());
  else body.append(...rows);
  rows.forEach(showTimes);
  while (body.rows.length > Number(body.dataset.most)) body.rows[newestFirst ? body.rows.length - 1 : 0].remove();
}

// Fetches a part again every two seconds while the page can be seen.
function refresh(element) {
  const again = async () => {
    if (document.visibilityState === "visible") {
      try {
        const answer = await fetch(element.dataset.refresh, { headers: { accept: "text/html" } });
        if (answer.ok && !answer.redirected) replace(element, await answer.text());
      } catch {
        // the next one tries again
      }
    }
    setTimeout(again, 2000);
  };
  setTimeout(again, 2000);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.dialog) document.getElementById(button.dataset.dialog).showModal();
  if ("close" in button.dataset) button.closest("dialog").close();
  if (button.dataset.load) {
    const target = document.getElementById(button.dataset.into);
    button.disabled = true;
    try {
      const answer = await fetch(button.dataset.load, { headers: { accept: "text/html" } });
      if (!answer.ok || answer.redirected) throw new Error(answer.redirected ? "sign in again" : `status ${answer.status}`);
      target.innerHTML = await answer.text();
      showTimes(target);
      button.hidden = true;
      target.tabIndex = -1;
      target.focus();
    } catch (error) {
      target.textContent = `The result was not fetched: ${error.message}.`;
    } finally {
      button.disabled = false;
    }
  }
});

document.addEventListener("DOMContentLoaded", () => {
  showTimes(document);
  if (document.body.dataset.live) follow(document.body.dataset.live);
  for (const element of document.querySelectorAll("[data-refresh]")) refresh(element);
});
