// Taking over an environment: keys or a gamepad become an action, which is sent many times a second while a person
// watches or acts. The server answers with the latest frame. Without a command the policy acts again after a second.
"use strict";

const PAIRS = [["KeyW", "KeyS"], ["KeyA", "KeyD"], ["KeyR", "KeyF"], ["KeyQ", "KeyE"], ["KeyI", "KeyK"], ["KeyJ", "KeyL"],
  ["KeyU", "KeyO"], ["KeyT", "KeyG"]];  // plus and minus of each number of the action
const STICKS = [[1, -1], [0, -1], [3, -1], [2, -1]];  // axis and sign of a gamepad for each number
const GRIPPER = "gripper", DEAD_ZONE = 0.12, SLOW = 0.3;
const takeover = {
  controls: null, run: null, mode: "away", keys: new Set(), held: new Map(), frame: {}, buttons: [], isBusy: false, timer: null,
};

const letter = (code) => code.replace("Key", "");
const isHeld = (name) => name === GRIPPER;

// The numbers of an action in [-1, 1]: keys, or sticks where no key is pressed; a gripper keeps its side.
function personAction() {
  const pad = gamepad(), scale = takeover.keys.has("ShiftLeft") || takeover.keys.has("ShiftRight") ? SLOW : 1;
  return takeover.controls.names.map((name, index) => {
    if (isHeld(name)) return takeover.held.get(index) ?? 1;
    const [plus, minus] = PAIRS[index] || [];
    let value = (takeover.keys.has(plus) ? 1 : 0) - (takeover.keys.has(minus) ? 1 : 0);
    if (!value && pad && STICKS[index]) {
      const [axis, sign] = STICKS[index], tilt = sign * (pad.axes[axis] || 0);
      value = Math.abs(tilt) < DEAD_ZONE ? 0 : tilt;
    }
    return value * scale;
  });
}

const gamepad = () => [...(navigator.getGamepads?.() || [])].find((pad) => pad && pad.connected) || null;

// Buttons of a gamepad, once for each press: A moves the gripper, B releases, Start takes over.
function readButtons() {
  const pad = gamepad();
  if (!pad) return;
  const now = pad.buttons.map((button) => button.pressed);
  const isNew = (index) => now[index] && !takeover.buttons[index];
  if (takeover.mode === "act" && isNew(0)) toggleGripper();
  if (isNew(1)) setMode("watch");
  if (isNew(9)) setMode("act");
  takeover.buttons = now;
}

function toggleGripper() {
  takeover.controls.names.forEach((name, index) => {
    if (isHeld(name)) takeover.held.set(index, (takeover.held.get(index) ?? 1) > 0 ? -1 : 1);
  });
}

function setMode(mode) {
  if (!takeover.controls || mode === takeover.mode) return;
  if (mode === "act") {  // a gripper stays where the policy has it
    takeover.keys.clear();
    takeover.controls.names.forEach((name, index) => {
      if (isHeld(name)) takeover.held.set(index, (takeover.frame.action?.[index] ?? 1) < 0 ? -1 : 1);
    });
  }
  takeover.mode = mode;
  showMode();
  if (!takeover.timer) tick();
}

function showMode() {
  const { mode, frame } = takeover;
  find("watch").textContent = mode === "away" ? "Watch" : "Stop watching";
  find("act").textContent = mode === "act" ? "Release (Esc)" : "Take over (Enter)";
  find("act").disabled = mode === "away";
  find("pilot").textContent = mode === "away" ? "training at full speed" : frame.acts === "person" ? "you act" : "the policy acts";
  find("pilot").className = `badge ${frame.acts === "person" && mode === "act" ? "good" : ""}`;
}

async function tick() {
  takeover.timer = null;
  const pause = Math.max(40, 500 / takeover.controls.rate);
  readButtons();
  if (!takeover.isBusy) await send().catch((error) => console.warn(error));
  if (takeover.mode !== "away" && takeover.controls) takeover.timer ??= setTimeout(tick, pause);
}

async function send() {
  takeover.isBusy = true;
  try {
    const command = { mode: takeover.mode, env: Number(find("env").value) };
    if (takeover.mode === "act") command.action = personAction();
    const answer = await fetch(`operate?run=${encodeURIComponent(takeover.run)}`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(command), cache: "no-store",
    });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || answer.statusText);
    if (takeover.mode !== "away" && found.env === command.env) showFrame(found);
  } finally {
    takeover.isBusy = false;
  }
}

function showFrame(frame) {
  takeover.frame = frame;
  if (frame.image) find("frame").src = `data:image/jpeg;base64,${frame.image}`;
  find("frame").hidden = !frame.image;
  const outcome = frame.success == null ? "" : frame.success ? " · the last one succeeded" : " · the last one failed";
  const words = frame.image ? frame.text || "" : "This environment has no images.";
  find("caption").textContent = `${words} ${frame.episodes} episodes ended${outcome}`.trim();
  find("numbers").textContent = takeover.controls.names.map((name, index) => `${name} ${(frame.action?.[index] ?? 0).toFixed(2)}`).join("   ");
  showMode();
}

// Called by view.js with what the run offers, or null.
function offerTakeover(controls, run) {
  find("takeover").hidden = !controls;
  if (!controls) {
    takeover.mode = "away";
    takeover.controls = null;
    return;
  }
  const key = JSON.stringify([controls, run]);
  if (takeover.key === key) return;
  Object.assign(takeover, { key, controls, run, mode: "away", frame: {} });
  const keys = controls.names.map((name, index) => {
    if (isHeld(name)) return [name, "Space"];
    return PAIRS[index] ? [`${name} + / −`, `${letter(PAIRS[index][0])} / ${letter(PAIRS[index][1])}`] : [name, "gamepad or none"];
  });
  find("keys").replaceChildren(...[...keys, ["slow", "Shift"]].map(([name, text]) => {
    const row = element("span");
    row.append(element("kbd", text), ` ${name}`);
    return row;
  }));
  find("env").replaceChildren(...Array.from({ length: controls.num_envs }, (_, index) => {
    const option = element("option", `environment ${index}`);
    option.value = String(index);
    return option;
  }));
  showMode();
}

addEventListener("keydown", (event) => {
  if (!takeover.controls || takeover.mode === "away" || event.ctrlKey || event.metaKey || event.altKey) return;
  const isOurs = PAIRS.some((pair) => pair.includes(event.code)) || ["Space", "Enter", "Escape", "ShiftLeft", "ShiftRight"].includes(event.code);
  if (!isOurs || event.target.tagName === "SELECT") return;
  if (event.code !== "ShiftLeft" && event.code !== "ShiftRight") event.preventDefault();
  if (event.repeat) return;
  if (event.code === "Enter") setMode(takeover.mode === "act" ? "watch" : "act");
  else if (event.code === "Escape") setMode("watch");
  else if (event.code === "Space") toggleGripper();
  else takeover.keys.add(event.code);
});
addEventListener("keyup", (event) => takeover.keys.delete(event.code));
// Whoever looks elsewhere does not act.
addEventListener("blur", () => takeover.mode === "act" && setMode("watch"));
document.addEventListener("visibilitychange", () => document.hidden && setMode("away"));
find("watch").addEventListener("click", () => setMode(takeover.mode === "away" ? "watch" : "away"));
find("act").addEventListener("click", (event) => {
  setMode(takeover.mode === "act" ? "watch" : "act");
  event.target.blur();  // so that Space moves the gripper, not this button
});
