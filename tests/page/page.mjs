// The status page in a real browser. Arguments: URL, key, folder for pictures, name of the rank to lose, its process id, browser,
// how many streams run all the while (their ids begin with "load-"), signal that loses the rank.
// Prints one line for each check; exit status 1 if any failed.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, key, folder, rank, victim, browserPath, streams = "0", signal = "SIGKILL"] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core"), "utf8");
const WAIT = 60000;
const LOOK_S = 10;
const MOST_BYTES = 65536; // of an event
const OF_LOAD = "load-";
let failures = 0;

function check(name, holds, detail = "") {
  if (!holds) failures += 1;
  console.log(`${holds ? "ok    " : "FAILED"} ${name}${detail ? `: ${detail}` : ""}`);
}

async function opened(browser, options) {
  const context = await browser.newContext({ bypassCSP: false, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(WAIT);
  const complaints = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(String(error)));
  const strangers = [];
  page.on("request", (request) => !request.url().startsWith(url) && !request.url().startsWith("data:") && strangers.push(request.url()));
  await page.goto(url);
  return { page, complaints, strangers };
}

async function withKey(page) {
  await page.keyboard.press("Tab"); // the link to what is wrong
  await page.keyboard.press("Tab");
  check("the second stop of the tab key is the field of the key", await page.evaluate(() => document.activeElement.id === "key"));
  await page.keyboard.type(key);
  await page.keyboard.press("Enter");
  await page.locator("#link", { hasText: /^live$/ }).waitFor();
  await page.locator(".rank.ok").first().waitFor();
}

// The page's own policy forbids scripts that are not its own, so this goes round it and not through a script element.
async function accessible(page, name) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document));
  const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
  const told = serious.map((one) => `${one.id} ${one.nodes.map((node) => node.target).join(" ")} ${one.nodes[0].failureSummary}`);
  check(`axe, ${name}: nothing serious`, serious.length === 0, told.join("; ") || `${violations.length} lesser`);
}

async function fits(page, name) {
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  check(`${name}: nothing beside the screen`, wide <= 0, `${wide} px`);
}

async function talks(page) {
  await page.locator("#prompt").focus();
  await page.keyboard.type("Who are you?");
  await page.evaluate(() => {
    window.lengths = new Set();
    const note = () => window.lengths.add(document.getElementById("answer").textContent.length);
    new MutationObserver(note).observe(document.getElementById("answer"), { childList: true, subtree: true, characterData: true });
  });
  await page.keyboard.press("Enter");
  const reply = page.locator("#answer p:nth-child(2)");
  await reply.waitFor({ state: "attached" });
  await page.locator("#send:not([disabled])").waitFor();
  const lengths = await page.evaluate(() => window.lengths.size);
  const text = await reply.textContent();
  check("the chat box streams", lengths >= 4, `${lengths} states seen, ${text.length} characters`);
  check("what it says makes sense", text.includes("I am LongCat-tiny"), text);
  const request = page.locator("#requests li").filter({ hasNotText: OF_LOAD }).first();
  await request.locator(".badge.ok").waitFor();
  await request.locator("rect.f-decode").first().waitFor({ state: "attached" });
  check("the request has a lane at both instances", (await request.locator(".lane").count()) === 2);
  const kinds = await request.locator("rect").evaluateAll((all) => [...new Set(all.map((one) => one.getAttribute("class")))]);
  check("its spans are drawn", ["f-prefill", "f-transfer", "f-decode", "f-tick"].every((kind) => kinds.includes(kind)), kinds.join(" "));
}

async function keyboardOnly(page) {
  await page.locator("#wrong-title").focus();
  await page.keyboard.press("Tab");
  check("the next stop is a rank", await page.evaluate(() => document.activeElement.classList.contains("rank")));
  await page.keyboard.press("ArrowRight");
  const name = await page.evaluate(() => document.activeElement.getAttribute("aria-label"));
  check("arrow keys go from rank to rank", /rank 1/.test(name), name);
  const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
  check("focus is to be seen", outline !== "none", outline);
  await page.keyboard.press("Enter");
  const told = await page.locator(".instance [role=status]").first().textContent();
  check("the enter key lets a rank say more", /Blocks: live \d+/.test(told), told);
  await page.locator("#requests summary").first().focus();
  await page.keyboard.press("Enter");
  await page.waitForTimeout(2500); // two more snapshots
  const state = await page.evaluate(() => [document.activeElement.tagName, document.activeElement.parentElement.open]);
  check("news take neither focus nor what is open", state[0] === "SUMMARY" && state[1] === true, state.join(" "));
}

async function underLoad(page) {
  await page.waitForFunction((least) => Number.parseInt(document.getElementById("open").textContent, 10) >= least, Number(streams));
  check("the page tells of the load", true, await page.locator("#open").textContent());
}

// For a while: how often a page hears and how much, how long it draws, and how much of its thread's time it
// takes: that, and not a pause, as the cluster computes on the same few cores.
async function lively(page, name) {
  const session = await page.context().newCDPSession(page);
  await session.send("Network.enable");
  await session.send("Performance.enable");
  const busy = async () => (await session.send("Performance.getMetrics")).metrics.find((one) => one.name === "ThreadTime").value;
  let received = 0;
  session.on("Network.dataReceived", (event) => (received += event.dataLength));
  const before = await busy();
  const seen = await page.evaluate(async (seconds) => {
    const found = { events: 0, longest: 0, drawn: 0, gap: 0, requests: 0 };
    const draw = window.show;
    window.show = (facts) => {
      const began = performance.now();
      draw(facts);
      found.events += 1;
      found.drawn = Math.max(found.drawn, performance.now() - began);
      found.longest = Math.max(found.longest, new TextEncoder().encode(JSON.stringify(facts)).length);
      found.requests = Math.max(found.requests, document.querySelectorAll("#requests > li").length);
    };
    let last = performance.now();
    const ticking = setInterval(() => {
      found.gap = Math.max(found.gap, performance.now() - last);
      last = performance.now();
    }, 50);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    clearInterval(ticking);
    window.show = draw;
    return found;
  }, LOOK_S);
  const computed = ((await busy()) - before) / LOOK_S;
  await session.detach();
  const { events, longest, drawn, gap, requests } = seen;
  check(`${name}: an event a second and no more`, events >= LOOK_S / 2 && events <= LOOK_S + 2, `${events} in ${LOOK_S} s`);
  check(`${name}: an event is bounded`, longest <= MOST_BYTES && requests <= 20, `${longest} bytes at most, ${requests} requests shown`);
  check(`${name}: so is what comes in a second`, received > 0 && received <= MOST_BYTES * (LOOK_S + 2), `${Math.round(received / LOOK_S)} bytes`);
  const pauses = `drawing took ${drawn.toFixed(0)} ms at most, a pause ${gap.toFixed(0)} ms with all else on this machine`;
  check(`${name}: it leaves its thread free`, computed < 0.25, `busy for ${(100 * computed).toFixed(1)} % of the time; ${pauses}`);
}

async function answersClick(page) {
  const began = Date.now();
  await page.locator(".rank").first().click();
  await page.locator('.rank[aria-pressed="true"]').first().waitFor();
  const seconds = (Date.now() - began) / 1000;
  check("a click on a rank is answered", seconds < 10, `${seconds.toFixed(2)} s`);
  await page.locator(".rank").first().click();
}

async function losesRank(page) {
  const began = Date.now();
  process.kill(Number(victim), signal);
  await page.locator(".rank.lost").first().waitFor();
  await page.locator("#wrong li", { hasText: rank }).first().waitFor();
  const seconds = (Date.now() - began) / 1000;
  const words = await page.locator("#wrong li").allTextContents();
  check("a killed rank turns red within 10 s", seconds < 10, `${seconds.toFixed(1)} s`);
  check("it is named with its machine", words.some((line) => line.includes(rank)), words.join(" | "));
  await page.waitForTimeout(4000);
  const later = await page.locator("#wrong li").allTextContents();
  check("it is still named when its instance is gone", later.some((line) => line.includes(rank)) && later.some((line) => line.includes("nobody answers")), later.join(" | "));
  const announced = await page.locator("#told").textContent();
  check("it is announced", announced.includes(rank), announced);
}

const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
try {
  const desk = await opened(browser, { viewport: { width: 1280, height: 900 }, colorScheme: "light" });
  await desk.page.locator("#key-section").waitFor();
  desk.complaints.length = 0; // the refusal without a key is one, and is meant
  await withKey(desk.page);
  await underLoad(desk.page);
  await talks(desk.page);
  await keyboardOnly(desk.page);
  await accessible(desk.page, "desktop, light");
  await fits(desk.page, "desktop");
  await desk.page.screenshot({ path: `${folder}/desktop.png`, fullPage: true });
  const hand = await opened(browser, { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true, colorScheme: "dark" });
  await hand.page.locator("#key").fill(key);
  hand.complaints.length = 0;
  await hand.page.locator("#key").press("Enter");
  await hand.page.locator(".rank.ok").first().waitFor();
  await hand.page.locator("#requests .lane").first().waitFor();
  await accessible(hand.page, "phone, dark");
  await fits(hand.page, "phone");
  await hand.page.screenshot({ path: `${folder}/phone.png`, fullPage: true });
  await Promise.all([lively(desk.page, "desktop"), lively(hand.page, "phone")]);
  await answersClick(desk.page);
  await losesRank(desk.page);
  await accessible(desk.page, "with a lost rank");
  await desk.page.screenshot({ path: `${folder}/lost.png`, fullPage: true });
  await hand.page.locator(".rank.lost").first().waitFor();
  await accessible(hand.page, "with a lost rank, dark");
  await hand.page.screenshot({ path: `${folder}/lost-phone.png`, fullPage: true });
  for (const [name, one] of [["desktop", desk], ["phone", hand]]) {
    check(`${name}: nothing in the console`, one.complaints.length === 0, one.complaints.join(" | "));
    check(`${name}: no call to anybody else`, one.strangers.length === 0, one.strangers.join(" "));
  }
} finally {
  await browser.close();
}
process.exit(failures ? 1 : 0);
