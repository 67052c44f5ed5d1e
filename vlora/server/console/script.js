// The console. Names of adapters, heads and owners are untrusted: they are rendered as text nodes only.

const POLL_MS = 500;
const FRAME_MS = 1000;
const WINDOW_S = 30;
const MAX_STEPS = 6000;
const MAX_ADAPTERS = 64;
const AXIS = 14; // pixels below the timeline's lanes
const MODES = ["merged", "mixed", "unmerged"];
const KINDS = { a: "adapters", p: "packed", k: "KV in use", c: "KV cached", f: "free" };
const COLOURS = { a: "--merged", p: "--packed", k: "--unmerged", c: "--cached", f: "--free" };
const TOKEN_KEY = "vlora-token";

const at = (id) => document.getElementById(id);

// -- requests to the server -----------------------------------------------------------------------------------------

let token = sessionStorage.getItem(TOKEN_KEY) ?? "";

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the server answered ${response.status}`);
  error.status = response.status;
  throw error;
}

function askForToken(problem) {
  at("token-button").hidden = false;
  at("token-problem").textContent = problem;
  if (!at("token-dialog").open) at("token-dialog").showModal();
}

at("token-button").addEventListener("click", () => askForToken(""));
at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token-field").value.trim();
  sessionStorage.setItem(TOKEN_KEY, token);
  at("token-field").value = "";
  at("token-dialog").close();
  known.count = -1;
  wake();
});

// -- the state, twice per second while the page is visible ----------------------------------------------------------

let state = null;
let steps = [];
let wake = () => {};

async function watch() {
  for (;;) {
    const began = performance.now();
    if (document.hidden || at("token-dialog").open) {
      await pause(60_000);
      continue;
    }
    try {
      const since = steps.length ? steps.at(-1).number : 0;
      take(await (await call(`/console/state?since=${since}`)).json());
    } catch (error) {
      if (error.status === 401) askForToken(token ? error.message : "");
      tellStatus("dead", error.status ? error.message : "no connection");
    }
    await pause(POLL_MS - (performance.now() - began));
  }
}

function pause(ms) {
  return new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, Math.max(ms, 50));
  });
}

document.addEventListener("visibilitychange", () => wake());

function take(fresh) {
  state = fresh;
  if (steps.length && fresh.stats.num_steps < steps.at(-1).number) steps = []; // the engine restarted
  for (const [number, endedS, stepS, switchS, mode, merged, numRequests, numTokens, numOthers] of fresh.steps) {
    steps.push({ number, endedS, stepS, switchS, mode, merged, numRequests, numTokens, numOthers });
  }
  steps = steps.slice(-MAX_STEPS);
  tellStatus(fresh.draining ? "draining" : "live", fresh.draining ? "draining" : "live");
  if (known.count !== fresh.stats.num_adapters) readAdapters(fresh.stats.num_adapters);
  readLearning();
  draw();
}

function tellStatus(kind, text) {
  const pill = at("status");
  if (pill.textContent === text) return; // screen readers announce only a changed status
  pill.className = `pill ${kind}`;
  document.body.classList.toggle("stale", kind === "dead"); // the page shows old data
  pill.textContent = text.length > 60 ? `${text.slice(0, 60)}…` : text;
  pill.title = text;
}

// -- helpers --------------------------------------------------------------------------------------------------------

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

function seconds(value) {
  if (value < 0.0995) return `${(value * 1e3).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(value < 9.95 ? 2 : 1)} s` : `${value.toFixed(0)} s`;
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const nameOf = (adapter) => adapter ?? "base model";

function colour(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable);
}

/** Sizes a canvas to its displayed size in device pixels; coordinates are CSS pixels. */
function paper(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function showTip(text, x, y) {
  const tip = at("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 16 + height > innerHeight ? y - height - 8 : y + 16}px`;
}

function hideTip() {
  at("tip").hidden = true;
}

for (const help of document.querySelectorAll(".help")) {
  help.addEventListener("click", (event) => showTip(help.title, event.clientX, event.clientY)); // touch shows no titles
  for (const left of ["pointerleave", "blur"]) help.addEventListener(left, hideTip);
}

/** Reuses existing children, so nothing flickers and text selections stay. */
function fill(parent, items, make, update, none) {
  if (parent.firstElementChild?.classList.contains("empty")) parent.replaceChildren();
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, place) => update(parent.children[place], item));
  if (!items.length) {
    const empty = parent.tagName === "TBODY" ? document.createElement("tr") : element("li");
    empty.className = "empty";
    const cell = parent.tagName === "TBODY" ? element("td", "empty") : empty;
    cell.textContent = none;
    if (cell !== empty) {
      cell.colSpan = 6;
      empty.append(cell);
    }
    parent.append(empty);
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// -- drawing --------------------------------------------------------------------------------------------------------

function draw() {
  drawFigures();
  drawTimeline();
  drawQueue();
  drawArena();
  drawAdapters();
  drawCameras();
  drawStreams();
}

function drawFigures() {
  const { stats } = state;
  const recent = steps.filter((step) => step.endedS > state.now_s - 5);
  setText(at("model"), state.model);
  at("model").title = state.model;
  const tokens = recent.reduce((sum, step) => sum + step.numTokens, 0) / 5;
  const busy = recent.reduce((sum, step) => sum + step.stepS, 0) / (recent.length || 1);
  setText(at("figure-tokens"), tokens.toFixed(tokens < 10 ? 1 : 0));
  setText(at("figure-step"), recent.length ? seconds(busy) : "–");
  for (const name of ["running", "waiting", "finished", "failed"]) {
    setText(at(`figure-${name}`), stats[`num_${name}`].toLocaleString("en"));
  }
  drawReplicas();
}

/** The serving replicas of all; the tooltip has a line for each. Hidden with one engine. */
function drawReplicas() {
  const { replicas } = state;
  at("replicas").hidden = !replicas.length;
  setText(at("figure-replicas"), `${replicas.filter((each) => each.state === "serving").length}/${replicas.length}`);
  at("replicas").title = replicas
    .map((each) => `${each.name}: ${each.state}, ${plural(each.num_requests, "request")}${each.cause ? ` (${each.cause})` : ""}`)
    .join("\n");
}

let chosen = null; // number of the step under the pointer or focus

function visibleSteps() {
  return steps.filter((step) => step.endedS > state.now_s - WINDOW_S);
}

function drawTimeline() {
  const shown = visibleSteps();
  const { pen, width, height } = paper(at("timeline"));
  const lane = (height - AXIS) / MODES.length;
  const x = (time) => ((time - state.now_s) / WINDOW_S + 1) * width;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "top";
  MODES.forEach((mode, row) => {
    pen.fillStyle = colour("--free");
    pen.globalAlpha = 0.45;
    pen.fillRect(0, row * lane + 1, width, lane - 2);
    pen.globalAlpha = 1;
  });
  pen.fillStyle = colour("--quiet");
  for (let ago = 10; ago < WINDOW_S; ago += 10) {
    const place = x(state.now_s - ago);
    pen.globalAlpha = 0.3;
    pen.fillRect(place, 0, 1, height);
    pen.globalAlpha = 1;
    pen.fillText(`${ago} s ago`, place + 4, height - AXIS + 2);
  }
  pen.globalAlpha = 1;
  const most = Math.max(4, ...shown.map((step) => step.numRequests));
  const colours = Object.fromEntries(MODES.map((mode) => [mode, colour(`--${mode}`)]));
  for (const step of shown) {
    const row = MODES.indexOf(step.mode);
    const end = x(step.endedS);
    const start = Math.min(x(step.endedS - step.stepS), end - 1.5);
    const tall = Math.max(3, ((lane - 17) * step.numRequests) / most);
    pen.fillStyle = step.number === chosen ? colour("--text") : colours[step.mode];
    pen.fillRect(start, (row + 1) * lane - 2 - tall, end - start, tall);
  }
  nameMerged(pen, shown, x, lane);
  tellModes(shown);
}

/** Draws the merged adapter's name over the first step of each run of steps, where there is room. */
function nameMerged(pen, shown, x, lane) {
  pen.fillStyle = colour("--text");
  const free = [0, 0, 0];
  let last = null;
  for (const step of shown) {
    const what = step.mode === "unmerged" ? null : step.merged;
    if (what !== null && what !== last) {
      const row = MODES.indexOf(step.mode);
      const name = what.length > 18 ? `${what.slice(0, 17)}…` : what;
      const left = x(step.endedS - step.stepS);
      if (left >= free[row]) {
        pen.fillText(name, left, row * lane + 3);
        free[row] = left + pen.measureText(name).width + 8;
      }
    }
    last = what;
  }
}

function tellModes(shown) {
  if (!shown.length) {
    setText(at("modes-summary"), `no step in the last ${WINDOW_S} s`);
    return;
  }
  const shares = MODES.map((mode) => {
    const share = shown.filter((step) => step.mode === mode).length / shown.length;
    return `${mode} ${(share * 100).toFixed(0)} %`;
  });
  const switches = shown.filter((step) => step.switchS > 0).length;
  const { saved_s: predicted, measured_saved_s: saved } = state.stats;
  const gain = `${saved < 0 ? "lost" : "saved"} ${seconds(Math.abs(saved))} (predicted ${predicted.toFixed(1)} s)`;
  const changes = plural(switches, "switch").replace("switchs", "switches");
  setText(at("modes-summary"), `${shares.join(" · ")} · ${changes} · ${gain} since the start`);
}

function describeStep(step) {
  const weights = step.merged === null ? "W0" : step.merged;
  const lines = [
    `step ${step.number.toLocaleString("en")}: ${step.mode}, weights of ${weights}`,
    `${plural(step.numRequests, "request")}, ${plural(step.numTokens, "token")}, ${seconds(step.stepS)}`,
    `${plural(step.numOthers, "other")} waited, ${(state.now_s - step.endedS).toFixed(1)} s ago`,
  ];
  if (step.switchS > 0) lines.push(`switched in ${seconds(step.switchS)}`);
  return lines.join("\n");
}

function choose(step, x, y) {
  chosen = step.number;
  showTip(describeStep(step), x, y);
  drawTimeline();
}

function leaveTimeline() {
  chosen = null;
  hideTip();
  if (state) drawTimeline();
}

at("timeline").addEventListener("pointermove", (event) => {
  if (!state) return;
  const box = at("timeline").getBoundingClientRect();
  const time = state.now_s - WINDOW_S * (1 - (event.clientX - box.left) / box.width);
  let best = null;
  for (const step of visibleSteps()) {
    const distance = Math.max(0, step.endedS - step.stepS - time, time - step.endedS);
    if (best === null || distance < best.distance) best = { step, distance };
  }
  if (best !== null && best.distance < 0.5) choose(best.step, event.clientX, event.clientY);
  else leaveTimeline();
});
at("timeline").addEventListener("pointerleave", leaveTimeline);
at("timeline").addEventListener("blur", leaveTimeline);
at("timeline").addEventListener("keydown", (event) => {
  if (!state) return;
  if (event.key === "Escape") leaveTimeline();
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const shown = visibleSteps();
  if (move === undefined || !shown.length) return;
  event.preventDefault();
  const place = shown.findIndex((step) => step.number === chosen);
  const next = place < 0 ? shown.length - 1 : Math.max(0, Math.min(shown.length - 1, place + move));
  const box = at("timeline").getBoundingClientRect();
  const ago = (state.now_s - shown[next].endedS) / WINDOW_S;
  choose(shown[next], box.right - ago * box.width, box.bottom - 12);
});

function drawQueue() {
  const { queue, stats } = state;
  const most = Math.max(2 * state.theta_s, ...queue.map((request) => request.credit_s));
  const starving = queue.filter((request) => request.credit_s > state.theta_s).length;
  const total = stats.num_running + stats.num_waiting;
  const others = total - queue.length; // behind these in the queue, or not admitted yet because of their latency bound
  const more = others > 0 ? `${others} more · ` : "";
  setText(at("queue-summary"), `${more}${starving} starving`);
  fill(
    at("queue-rows"),
    queue,
    () => {
      const row = element("li");
      const bar = element("span", "bar");
      bar.append(element("i"), element("b"));
      row.append(element("span", "ellipsis"), bar, element("span", "number"), element("span", "quiet ellipsis"));
      return row;
    },
    (row, request) => {
      const [name, bar, credit, what] = row.children;
      const starves = request.credit_s > state.theta_s;
      setText(name, nameOf(request.adapter));
      name.title = name.textContent;
      bar.firstChild.className = starves ? "starving" : "";
      bar.firstChild.style.width = `${(100 * request.credit_s) / most}%`;
      bar.lastChild.style.left = `${(100 * state.theta_s) / most}%`;
      bar.title = `credit ${seconds(request.credit_s)}; starving from θ = ${seconds(state.theta_s)}`;
      setText(credit, seconds(request.credit_s));
      setText(what, starves ? "starving" : request.running ? "running" : "waiting");
      const asks = request.head === null ? `words, ${plural(request.num_sampled, "token")} so far` : `head ${request.head}`;
      row.title = `${asks}; ${plural(request.new_tokens, "token")} to compute; last ran ${seconds(request.waited_s)} ago`;
    },
    "no requests",
  );
}

// -- the arena ------------------------------------------------------------------------------------------------------

let arenaGrid = { columns: 1, size: 1 };

function drawArena() {
  const { arena, stats } = state;
  const { pen, width, height } = paper(at("arena-map"));
  const count = arena.cells.length;
  let size = Math.max(3, Math.min(22, Math.sqrt((width * height) / count)));
  while (size > 3 && Math.ceil(count / Math.floor(width / size)) * size > height) size -= 0.25;
  const columns = Math.max(1, Math.floor(width / size));
  arenaGrid = { columns, size };
  const colours = Object.fromEntries(Object.entries(COLOURS).map(([kind, name]) => [kind, colour(name)]));
  for (let cell = 0; cell < count; cell += 1) {
    pen.fillStyle = colours[arena.cells[cell]];
    pen.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
  }
  const packed = arena.runs.filter((run) => run[0] === null).reduce((sum, run) => sum + run[2], 0) * arena.page_bytes;
  const used = { a: stats.adapter_bytes - packed, p: packed, k: stats.kv_bytes, c: stats.cached_kv_bytes };
  used.f = stats.arena_bytes - used.a - used.p - used.k - used.c;
  const share = stats.arena_bytes ? (used.a + used.p + used.k) / stats.arena_bytes : 0;
  setText(at("arena-summary"), `${bytes(stats.arena_bytes)} · ${(share * 100).toFixed(0)} % in use`);
  const empty = used.f === stats.arena_bytes && [...arena.cells].every((kind) => kind === "f");
  at("arena").classList.toggle("all-free", empty);
  fill(
    at("arena-legend"),
    empty ? [] : Object.keys(KINDS),
    () => {
      const item = element("li");
      item.append(element("i"), element("span"));
      return item;
    },
    (item, kind) => {
      item.firstChild.className = kind;
      setText(item.lastChild, `${KINDS[kind]} ${bytes(used[kind])}`);
    },
    "all free: no adapter is loaded, no request runs",
  );
}

at("arena-map").addEventListener("pointermove", (event) => {
  if (!state) return;
  const { arena } = state;
  const box = at("arena-map").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / arenaGrid.size);
  const cell = Math.floor((event.clientY - box.top) / arenaGrid.size) * arenaGrid.columns + column;
  if (column >= arenaGrid.columns || cell >= arena.cells.length) return hideTip();
  const first = cell * arena.pages_per_cell;
  const last = Math.min(first + arena.pages_per_cell, arena.num_pages) - 1;
  const owners = arena.runs.filter(([, start, pages]) => start <= last && start + pages > first);
  const names = owners.map(([name]) => name ?? "packed copies").join(", ");
  const pages = first === last ? `page ${first}` : `pages ${first} to ${last}`;
  showTip(`${pages}: ${names || KINDS[arena.cells[cell]]}`, event.clientX, event.clientY);
});
at("arena-map").addEventListener("pointerleave", hideTip);

// -- adapters -------------------------------------------------------------------------------------------------------

const known = { count: -1, adapters: [], asked: [] };

async function readAdapters(count) {
  known.count = count;
  try {
    known.adapters = await (await call("/console/adapters")).json();
    const domains = known.adapters.flatMap(({ name, domains }) =>
      domains.filter((domain) => domain.name !== name).map((domain) => ({ ...domain, heads: [], domain: true })),
    );
    known.asked = [...known.adapters, ...domains];
    const heads = known.adapters.flatMap(({ name, heads }) => heads.map((head) => option(`${name}/${head.name}`, "")));
    at("camera-tasks").replaceChildren(...heads);
    at("admin-names").replaceChildren(...known.adapters.map(({ name }) => option(name, "")));
    offerAdapters();
  } catch {
    known.count = -1; // read again with the next state
  }
}

const administer = {
  load: (name, path) => post("/v1/adapters", { name, path }),
  pin: (name) => call(`/v1/adapters/${encodeURIComponent(name)}/pin`, { method: "PUT" }),
  unpin: (name) => call(`/v1/adapters/${encodeURIComponent(name)}/pin`, { method: "DELETE" }),
  unload: (name) => call(`/v1/adapters/${encodeURIComponent(name)}?drain=true`, { method: "DELETE" }),
};

at("admin-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const what = event.submitter?.value ?? "load";
  const buttons = [...at("admin-form").querySelectorAll("button")];
  const name = at("admin-name").value.trim();
  buttons.forEach((button) => (button.disabled = true));
  setText(at("admin-note"), `${what} ${name}…`);
  try {
    await administer[what](name, at("admin-path").value.trim());
    setText(at("admin-note"), `${what} ${name}: done`);
  } catch (error) {
    setText(at("admin-note"), error.message);
  }
  known.count = -1; // new content under an existing name may have other heads
  buttons.forEach((button) => (button.disabled = false));
});

function drawAdapters() {
  const { adapters, stats } = state;
  at("admin").hidden = !state.admin;
  const most = Math.max(1, ...adapters.map((adapter) => adapter.rate));
  const active = new Set(adapters.map(({ name }) => name));
  const resting = known.adapters.filter(({ name }) => !active.has(name)).slice(0, Math.max(0, MAX_ADAPTERS - active.size));
  const rest = stats.num_adapters - active.size - resting.length;
  const more = rest > 0 ? ` · ${rest.toLocaleString("en")} more` : "";
  setText(at("adapters-summary"), `${stats.num_resident_adapters} of ${stats.num_adapters} on the device${more}`);
  fill(
    at("adapter-rows"),
    [...adapters, ...resting.map(({ name }) => ({ name, place: "disk", rate: 0, num_under_way: 0 }))],
    () => {
      const row = element("tr");
      for (const kind of ["", "place", "number", "number", "number", "number"]) row.append(element("td", kind));
      const load = element("span", "bar load");
      load.append(element("i"));
      row.children[2].append(load, document.createTextNode(""));
      row.children[0].append(document.createTextNode(""));
      return row;
    },
    (row, adapter) => {
      const [name, place, rate, underWay, rank, size] = row.children;
      const tags = [adapter.merged && "merged", adapter.pinned && "pinned"].filter(Boolean);
      const label = [adapter.name, ...tags].join("\n");
      if (name.dataset.label !== label) {
        name.dataset.label = label;
        name.replaceChildren(document.createTextNode(adapter.name), ...tags.map((tag) => element("span", `tag ${tag}`, tag)));
        name.title = adapter.name;
      }
      place.className = `place ${adapter.place}`;
      setText(place, adapter.place);
      rate.firstChild.firstChild.style.width = `${(100 * adapter.rate) / most}%`;
      rate.lastChild.nodeValue = adapter.rate.toFixed(adapter.rate < 9.95 ? 1 : 0);
      setText(underWay, String(adapter.num_under_way));
      setText(rank, String(adapter.rank ?? "–"));
      setText(size, adapter.num_bytes === undefined ? "–" : bytes(adapter.num_bytes));
    },
    "no adapters are registered",
  );
}

// -- trainings and versions -----------------------------------------------------------------------------------------

const LEARNING_MS = 2000;
const learning = { readAt: -LEARNING_MS, trainings: [], adapters: [] };

async function readLearning() {
  const shown = state.learns || state.stats.trainings.length > 0;
  at("learning").hidden = !shown;
  document.body.classList.toggle("learns", shown);
  if (!shown || performance.now() - learning.readAt < LEARNING_MS) return;
  learning.readAt = performance.now();
  try {
    learning.trainings = (await (await call("/v1/trainings")).json()).data;
    learning.adapters = (await (await call("/v1/learning")).json()).data;
    drawTrainings();
    drawVersions();
  } catch {
    // The next state shows whether the server has ended.
  }
}

function drawTrainings() {
  fill(
    at("training-rows"),
    learning.trainings.toReversed(),
    () => {
      const row = element("li");
      row.append(element("span", "ellipsis"), element("span", "number"), element("canvas"), element("span", "quiet ellipsis"));
      return row;
    },
    (row, training) => {
      const [name, steps, curve, what] = row.children;
      setText(name, training.name);
      name.title = training.name;
      setText(steps, `step ${training.step.toLocaleString("en")} of ${training.num_steps.toLocaleString("en")}`);
      const { held_out_before: before, held_out_after: after } = training;
      const held = before === null ? "" : ` · held out ${before.toFixed(3)}${after === null ? "" : ` → ${after.toFixed(3)}`}`;
      const loss = training.loss === null ? "" : ` · loss ${training.loss.toFixed(3)}`;
      const why = training.error ?? training.waiting;
      const bad = training.num_bad ? ` · ${training.num_bad} records set aside` : "";
      setText(what, `${training.state}${loss}${held}${bad}${why ? ` · ${why}` : ""}`);
      what.title = [what.textContent, ...training.bad].join("\n");
      drawLosses(curve, training.losses);
    },
    "no trainings",
  );
}

function drawLosses(canvas, losses) {
  const { pen, width, height } = paper(canvas);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", losses.length ? `losses from ${losses[0].toFixed(3)} to ${losses.at(-1).toFixed(3)}` : "no losses");
  if (losses.length < 2) return;
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  pen.strokeStyle = colour("--unmerged");
  pen.lineWidth = 1.5;
  pen.beginPath();
  losses.forEach((loss, place) => {
    const x = 1 + ((width - 2) * place) / (losses.length - 1);
    pen.lineTo(x, 2 + (height - 4) * (1 - (loss - low) / (high - low || 1)));
  });
  pen.stroke();
}

function drawVersions() {
  const { adapters } = learning;
  const doing = adapters.map((each) => {
    const left = each.until_training === null ? "" : `, ${each.until_training} corrections until the next training`;
    return `${each.name} ${each.doing}${left}`;
  });
  if (!changing) setText(at("learning-summary"), doing.join(" · "));
  fill(
    at("version-rows"),
    adapters.flatMap((each) => each.versions.map((version) => ({ name: each.name, ...version }))),
    () => {
      const row = element("tr");
      for (const kind of ["ellipsis", "", "", "number", "number", "number"]) row.append(element("td", kind));
      const button = element("button");
      button.type = "button";
      button.addEventListener("click", () => change(row.dataset));
      row.lastChild.append(button);
      return row;
    },
    (row, version) => {
      const [name, hash, what, accuracy, corrected, action] = row.children;
      Object.assign(row.dataset, { name: version.name, version: version.version, state: version.state });
      setText(name, version.name);
      setText(hash, version.version.slice(0, 8));
      hash.title = [version.version, version.origin].filter(Boolean).join("\n");
      what.className = version.state;
      setText(what, version.state);
      setText(accuracy, share(version.live ?? version.trusted));
      setText(corrected, `${version.num_wrong} of ${version.num_answers}`);
      const button = action.firstChild;
      button.hidden = !state.admin || version.state === "present";
      setText(button, version.state === "previous" ? "Roll back" : "Promote");
      button.title =
        version.state === "previous" ? "serve this version again" : "evaluate it again, and serve it if it is better";
    },
    "no adapter learns",
  );
}

function share(compared) {
  if (!compared?.count) return "–";
  const percent = (right) => `${((100 * right) / compared.count).toFixed(0)} %`;
  return `${percent(compared.candidate)}, was ${percent(compared.present)}`;
}

let changing = false;

async function change({ name, version, state: what }) {
  if (changing) return;
  changing = true;
  const verb = what === "previous" ? "rollback" : "promote";
  setText(at("learning-summary"), `${verb} ${name}…`);
  try {
    await post(`/v1/learning/${encodeURIComponent(name)}/${verb}`, { version });
    setText(at("learning-summary"), `${verb} ${name}: done`);
  } catch (error) {
    setText(at("learning-summary"), error.message);
  }
  learning.readAt = -LEARNING_MS;
  setTimeout(() => (changing = false), 3000); // until then the outcome is shown
}

// -- cameras --------------------------------------------------------------------------------------------------------

const changed = (name, fields) => post(`/v1/cameras/${encodeURIComponent(name)}`, fields, undefined, "PATCH");
const cameraActions = {
  add: (name, fields) => post("/v1/cameras", { name, ...fields }),
  change: changed,
  pause: (name) => changed(name, { paused: true }),
  resume: (name) => changed(name, { paused: null }),
  remove: (name) => call(`/v1/cameras/${encodeURIComponent(name)}`, { method: "DELETE" }),
};

async function changeCamera(what, name, fields = {}) {
  const buttons = [...document.querySelectorAll("#camera-rows button, #camera-form button")];
  buttons.forEach((button) => (button.disabled = true));
  setText(at("camera-note"), `${what} ${name}…`);
  try {
    await cameraActions[what](name, fields);
    at("camera-form").reset();
    setText(at("camera-note"), `${what} ${name}: done`);
  } catch (error) {
    setText(at("camera-note"), error.message);
  }
  buttons.forEach((button) => (button.disabled = false));
}

at("camera-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const [source, asked, rate] = ["source", "task", "rate"].map((field) => at(`camera-${field}`).value.trim());
  const task = /^[^/\s]+\/[^/\s]+$/.test(asked) ? { head: asked } : { question: asked };
  const fields = { ...(source && { source }), ...(asked && { tasks: [task] }), ...(rate && { rate: Number(rate) }) };
  changeCamera(event.submitter?.value ?? "add", at("camera-name").value.trim(), fields);
});

function drawCameras() {
  const cameras = state.cameras ?? [];
  at("camera-rows").hidden = !cameras.length;
  at("camera-admin").hidden = !state.cameras || !state.admin;
  fill(
    at("camera-rows"),
    cameras,
    () => {
      const row = element("li");
      row.append(element("span", "name ellipsis"), element("span", "place"), element("span", "buttons"), element("span", "quiet ellipsis"));
      for (const name of ["Pause", "Remove"]) {
        const button = element("button", "", name);
        button.type = "button";
        button.addEventListener("click", () => changeCamera(button.textContent.toLowerCase(), row.dataset.name));
        row.children[2].append(button);
      }
      return row;
    },
    (row, { name, source, state: what, health, num_events: events }) => {
      const [title, place, buttons, facts] = row.children;
      row.dataset.name = name;
      setText(title, name);
      title.title = source;
      place.className = `place ${{ running: "device", lost: "arriving", failed: "arriving" }[what] ?? "host"}`;
      setText(place, what);
      buttons.hidden = !state.admin;
      setText(buttons.firstChild, what === "paused" ? "Resume" : "Pause");
      const age = health.age_s === null ? "" : `${seconds(health.age_s)} ago`;
      const counts = [plural(events, "event"), plural(health.num_reconnects, "reconnect"), health.error];
      setText(facts, [`${health.fps.toFixed(1)} frames/s`, age, ...counts].filter(Boolean).join(" · "));
      facts.title = facts.textContent;
    },
    "no cameras",
  );
}

// -- streams --------------------------------------------------------------------------------------------------------

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.dataset.seen = entry.isIntersecting ? "yes" : "";
});

function drawStreams() {
  const { streams, num_streams: total } = state;
  const hidden = total - streams.length;
  const others = hidden > 0 ? ` · ${hidden} of others` : "";
  setText(at("streams-summary"), `${plural(streams.length, "stream")}${others}`);
  fill(
    at("stream-cards"),
    streams,
    () => {
      const card = element("li", "card");
      const words = element("div", "words");
      words.append(element("p", "name"), element("p", "says"), element("p", "whose quiet"), element("p", "quiet"));
      const frame = element("div", "frame", "no frame yet");
      card.append(frame, words);
      seen.observe(card);
      return card;
    },
    (card, stream) => {
      const [frame, words] = card.children;
      if (card.dataset.number !== String(stream.number)) {
        card.dataset.number = String(stream.number);
        dropPicture(frame);
      }
      const { last } = stream;
      const [name, says, whose, counts] = words.children;
      setText(name, stream.name || `stream ${stream.number}`);
      const latency = last ? ` · ${seconds(last.latency_s)}` : "";
      const confidence = last?.confidence == null ? "" : ` ${(last.confidence * 100).toFixed(0)} %`;
      says.classList.toggle("problem", Boolean(last?.problem));
      setText(says, !last ? "waiting for frames" : last.label === null ? last.problem : `${last.label}${confidence}${latency}`);
      says.title = says.textContent;
      if (!frame.firstElementChild) setText(frame, stream.num_answered ? "waiting for its next frame" : "no frame yet");
      setText(whose, stream.asks.join(", "));
      whose.title = stream.owner === null ? whose.textContent : `${whose.textContent}, opened with token ${stream.owner}`;
      const lost = [stream.num_dropped && `${stream.num_dropped} dropped`, stream.num_failed && `${stream.num_failed} failed`];
      setText(counts, [`${stream.num_answered.toLocaleString("en")} answered`, ...lost].filter(Boolean).join(" · "));
    },
    hidden > 0 ? "none of yours; an admin's token shows them all" : "no stream is open",
  );
}

function dropPicture(frame) {
  if (frame.firstElementChild) URL.revokeObjectURL(frame.firstElementChild.src);
  frame.replaceChildren(document.createTextNode("no frame yet"));
}

async function refreshFrames() {
  for (;;) {
    const cards = document.hidden ? [] : [...at("stream-cards").querySelectorAll(".card")].filter((card) => card.dataset.seen);
    await Promise.all(cards.map(refreshFrame));
    await new Promise((resolve) => setTimeout(resolve, FRAME_MS));
  }
}

async function refreshFrame(card) {
  const { number } = card.dataset;
  try {
    const response = await call(`/console/streams/${number}/frame`);
    if (response.status === 204 || card.dataset.number !== number) return;
    const url = URL.createObjectURL(await response.blob());
    const frame = card.firstElementChild;
    const picture = frame.firstElementChild ?? element("img");
    if (picture.src) URL.revokeObjectURL(picture.src);
    picture.src = url;
    picture.alt = `last answered frame of stream ${number}`;
    if (!picture.isConnected) frame.replaceChildren(picture);
  } catch {
    // The stream or the server has ended; the next state shows which.
  }
}

// -- requests -------------------------------------------------------------------------------------------------------

let images = []; // { url: data URL }
let asking = null; // AbortController

function option(value, text) {
  const made = element("option", "", text);
  made.value = value;
  return made;
}

function offerAdapters() {
  const before = at("ask-adapter").value;
  // The value is the adapter's index, so no name can collide with another value.
  at("ask-adapter").replaceChildren(option("", "base model"), ...known.asked.map(({ name, domain }, place) => option(String(place), domain ? `${name} (domain)` : name)));
  if (before !== "" && known.asked[before]) at("ask-adapter").value = before;
  offerHeads();
}

function chosenAdapter() {
  return known.asked[at("ask-adapter").value] ?? null;
}

function chosenHead() {
  return chosenAdapter()?.heads[at("ask-head").value] ?? null;
}

function offerHeads() {
  const heads = chosenAdapter()?.heads ?? [];
  const frames = (head) => (head.num_frames > 1 ? `, ${head.num_frames} images` : "");
  at("ask-head").replaceChildren(
    option("", chosenAdapter()?.domain ? "its better way" : "in words"),
    ...heads.map((head, place) => option(String(place), `head ${head.name} (${head.task}${frames(head)})`)),
  );
  offerQuestion();
}

function offerQuestion() {
  const head = chosenHead();
  at("ask-question").disabled = head !== null;
  at("ask-question").placeholder = head?.prompt ?? chosenAdapter()?.question ?? "what is shown ?";
}

at("ask-adapter").addEventListener("change", offerHeads);
at("ask-head").addEventListener("change", offerQuestion);

function readImage(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

async function addImages(files) {
  const pictures = [...files].filter((file) => file.type.startsWith("image/"));
  try {
    for (const file of pictures) images.push(await readImage(file));
  } catch (error) {
    fail(error);
  }
  showImages();
}

function showImages() {
  at("ask-previews").replaceChildren(
    ...images.map((url, place) => {
      const preview = element("img");
      preview.src = url;
      preview.alt = `image ${place + 1}`;
      return preview;
    }),
  );
  at("ask-files-hint").hidden = images.length > 0;
}

at("ask-files").addEventListener("change", () => {
  addImages(at("ask-files").files);
  at("ask-files").value = "";
});
for (const kind of ["dragenter", "dragover"]) {
  at("ask-drop").addEventListener(kind, (event) => {
    event.preventDefault();
    at("ask-drop").classList.add("over");
  });
}
for (const kind of ["dragleave", "drop"]) at("ask-drop").addEventListener(kind, () => at("ask-drop").classList.remove("over"));
at("ask-drop").addEventListener("drop", (event) => {
  event.preventDefault();
  addImages(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) addImages(event.clipboardData.files);
});
at("ask-clear").addEventListener("click", () => {
  asking?.abort();
  images = [];
  showImages();
  at("answer").replaceChildren();
  at("ask-question").value = "";
  setText(at("ask-note"), "");
});
at("ask-stop").addEventListener("click", () => asking?.abort());
at("ask-question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask-form").requestSubmit();
  }
});

at("ask-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  at("ask-send").disabled = true;
  at("ask-stop").disabled = false;
  at("answer").replaceChildren();
  setText(at("ask-note"), "asking…");
  const began = performance.now();
  try {
    const said = chosenHead() === null ? await askInWords(asking.signal) : await askHead(asking.signal);
    setText(at("ask-note"), `${said}${seconds((performance.now() - began) / 1e3)}`);
  } catch (error) {
    if (error.name === "AbortError") setText(at("ask-note"), "stopped");
    else fail(error);
  }
  asking = null;
  at("ask-send").disabled = false;
  at("ask-stop").disabled = true;
});

function fail(error) {
  setText(at("ask-note"), "");
  at("answer").append(element("p", "problem", error.message));
}

function post(path, body, signal, method = "POST") {
  return call(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
}

async function askInWords(signal) {
  const question = at("ask-question").value || at("ask-question").placeholder;
  const content = [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: question }];
  const body = {
    model: chosenAdapter()?.name ?? state?.model ?? "",
    messages: [{ role: "user", content }],
    answer: chosenAdapter()?.domain ? null : "words",
    stream: true,
    stream_options: { include_usage: true },
  };
  const response = await post("/v1/chat/completions", body, signal);
  const text = element("p", "text");
  at("answer").append(text);
  let usage = null;
  let last = {};
  for await (const part of events(response.body)) {
    if (part.error) throw new Error(part.error.message);
    text.append(part.choices[0]?.delta?.content ?? "");
    usage = part.usage ?? usage;
    if (part.choices[0]?.answered_by) last = part.choices[0];
  }
  if (last.answered_by === "head") return `head ${last.head.head}, ${(last.confidence * 100).toFixed(1)} % · `;
  return usage ? `${plural(usage.completion_tokens, "token")} · ` : "";
}

/** Server-sent events as objects, up to [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const line of whole) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function askHead(signal) {
  const path = [chosenAdapter().name, chosenHead().name].map(encodeURIComponent).join("/");
  const answer = await (await post(`/v1/heads/${path}`, { images }, signal)).json();
  const scores = element("div", "scores");
  const best = Object.entries(answer.scores ?? {}).sort((one, other) => other[1] - one[1]).slice(0, 12);
  for (const [label, score] of best) {
    const bar = element("span", "bar");
    const inner = element("i");
    inner.style.width = `${score * 100}%`;
    bar.append(inner);
    scores.append(element("span", "", label), bar, element("span", "number", `${(score * 100).toFixed(1)} %`));
  }
  at("answer").append(element("p", "text", answer.label), scores);
  for (const [label, value] of Object.entries(answer.values ?? {})) {
    at("answer").append(element("p", "", `${label} ${value.toPrecision(4)} ± ${answer.deviations[label].toPrecision(2)}`));
  }
  const shown = images.map((url, place) => drawBoxes(url, (answer.boxes ?? []).filter((box) => box.image === place)));
  if (answer.boxes) at("answer").append(...(await Promise.all(shown)));
  return "";
}

/** Draws the boxes of a detection head on the image; edges are in image pixels. */
async function drawBoxes(url, boxes) {
  const picture = new Image();
  picture.src = url;
  await picture.decode();
  const canvas = element("canvas", "found");
  [canvas.width, canvas.height] = [picture.naturalWidth, picture.naturalHeight];
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0);
  const unit = Math.max(1, canvas.width / 320); // the same size on screen for any image size
  pen.strokeStyle = pen.fillStyle = "#ffdc50";
  pen.lineWidth = 2 * unit;
  pen.font = `${13 * unit}px system-ui, sans-serif`;
  for (const { label, score, left, top, right, bottom } of boxes) {
    pen.strokeRect(left, top, right - left, bottom - top);
    pen.fillText(`${label} ${(score * 100).toFixed(0)} %`, left, Math.max(13 * unit, top - 4 * unit));
  }
  return canvas;
}

// -- start ----------------------------------------------------------------------------------------------------------

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state && draw());
new ResizeObserver(() => state && (drawTimeline(), drawArena())).observe(at("arena-map"));
offerAdapters();
watch();
refreshFrames();
