/* SMQ client for browsers, Node.js and other runtimes with WebSockets: publish, subscribe and request.
 *
 *     import {SmqClient} from "@smqrt/client"; // from a server: "/rtl/smq.mjs"
 *
 *     const smq = new SmqClient("ws://127.0.0.1:9357/chat/smq.lsp");
 *     smq.publish("hello", "greeting"); // queued until there is a connection
 *     for await (const message of smq.messages("greeting")) console.log(message.text);
 *
 * All methods may be called at any time; messages and requests are queued while there is no connection. After a reconnect, topics
 * are numbered, subscribed and observed again before onreconnect is called, unless the option cleanstart is true. disconnect()
 * first sends the queued messages; its promise resolves to whether the broker has received them.
 *
 * The server makes /rtl/smq.js from this file: a classic script that sets the global SMQ. Pages in old browsers load it, so the
 * file has the syntax of ES2018 and one export statement, at its end.
 *
 * Terms: tid = topic id, etid = the id of this client, to which other clients can send, ptid = the publisher's etid,
 * subtid = sub-topic id (0 = none).
 */

const INIT = 1, CONNECT = 2, CONNACK = 3, SUBSCRIBE = 4, SUBACK = 5, CREATE = 6, CREATEACK = 7, PUBLISH = 8, UNSUBSCRIBE = 9,
    DISCONNECT = 11, PING = 12, PONG = 13, OBSERVE = 14, UNOBSERVE = 15, CHANGE = 16, CREATESUB = 17, CREATESUBACK = 18;
const VERSION = 1, SELF = "self";
const MAX_PAYLOAD_BYTES = 0xFFF0, MIN_UID_BYTES = 6, MAX_COUNTED_BYTES = 255, MAX_PACKET_BYTES = 0xFFFF;
const MAX_NAME_BYTES = 0xFFF7, MAX_INFO_BYTES = 65000; // their packets fit into one frame
const MAX_TIMER_MS = 0x7FFFFFFF; // a longer timer fires at once
const MAX_PONGS_BYTES = 65536; // of queued Pongs, for a broker that pings without reading
const MIN_RETRY_MS = 1000; // between two attempts when onclose says when, or when the page wakes
const STABLE_MS = 10000; // a connection that lasted so long resets the delay before a reconnect
const WAKE_PONG_MS = 3000; // until a connection counts as lost, after the page has become visible or the network changed
const MAX_PENDING_NAMES = 100000; // without an acknowledgement; further ones are denied
const MAX_REQUESTS = 10000, MAX_ENDED_REQUESTS = 1000; // open ones; ended ones whose late replies are discarded
const REFUSALS = ["", "protocol version not supported", "server unavailable", "incorrect credentials",
    "client certificate required", "client certificate not accepted", "access denied"];
const SERVER_UNAVAILABLE = 2;
const RESTART = "sysshutdown"; // the text of Disconnect at a shutdown; the server may start again
const CALLBACKS = ["onauth", "onconnect", "onreconnect", "onclose", "onmsg", "onstate"];

/** Defaults of `new SmqClient`; times are milliseconds. */
const DEFAULTS = {
    timeout: 10000,
    reconnect: true,
    reconnectDelay: 1000,
    reconnectDelayMax: 30000,
    ping: 120000,
    pong: 10000,
    queueMessages: 10000,
    queueBytes: 16 * 1024 * 1024,
    queuePolicy: "newest",
};
const CLIENT_DEFAULTS = Object.assign({}, DEFAULTS, {reconnect: false, ping: 0});
const STREAM_MESSAGES = 1000, STREAM_BYTES = 16 * 1024 * 1024; // what waits for one loop over messages()

/** An error of the client. `code`: "aborted", "closed", "denied", "full", "lost", "timeout" or "undelivered". */
class SmqError extends Error {
    constructor(code, message) {
        super(message);
        this.name = "SmqError";
        this.code = code;
    }
}

// ---- bytes and text

const encoder = new TextEncoder(), strictDecoder = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true}),
    lenientDecoder = new TextDecoder("utf-8", {ignoreBOM: true});

const utf8 = {
    length: text => encoder.encode(text).length,
    encode: text => encoder.encode(text),
    decode: bytes => strictDecoder.decode(bytes), // throws when it is not UTF-8
};

const isArrayBuffer = data => Object.prototype.toString.call(data) === "[object ArrayBuffer]"; // also one of another frame

function toBytes(data) { // a copy, because messages can wait in the queue
    if (typeof data === "string") return utf8.encode(data);
    if (ArrayBuffer.isView(data)) return new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice();
    if (isArrayBuffer(data)) return new Uint8Array(data.slice(0));
    if (Array.isArray(data)) return Uint8Array.from(data);
    const kind = data === null ? "null" : typeof data;
    throw new TypeError(`SMQ: text, bytes or an array of bytes is needed, not ${kind}; pubjson sends other values as JSON`);
}

function toJson(value) {
    const text = JSON.stringify(value);
    if (text === undefined) throw new TypeError(`SMQ: ${typeof value} cannot be sent as JSON`);
    return text;
}

/** Text and bytes as they are, any other value as JSON, also an array. */
const toPayload = data => typeof data === "string" || isArrayBuffer(data) || ArrayBuffer.isView(data) ? data : toJson(data);

function packet(type, ...parts) { // a number becomes four bytes; other parts are text or bytes
    const chunks = parts.map(part => {
        if (typeof part !== "number") return typeof part === "string" ? utf8.encode(part) : part;
        return [part >>> 24, part >>> 16 & 255, part >>> 8 & 255, part & 255];
    });
    const bytes = new Uint8Array(chunks.reduce((size, chunk) => size + chunk.length, 1));
    bytes[0] = type;
    let at = 1;
    for (const chunk of chunks) {
        bytes.set(chunk, at);
        at += chunk.length;
    }
    return bytes;
}

const counted = text => {
    const bytes = toBytes(text);
    return [bytes.length, ...bytes];
};

function call(fn, ...args) { // an error of the application must not stop the client
    try {
        return fn ? fn(...args) : undefined;
    } catch (error) {
        console.error(error);
    }
}

// ---- names and numbers, in both directions

class Names {
    constructor() {
        this.clear();
    }
    clear() {
        this.numbers = new Map();
        this.names = new Map();
    }
    add(name, number) { // returns whether the number is new
        const known = this.numbers.get(name) === number;
        this.numbers.set(name, number);
        this.names.set(number, name);
        return !known;
    }
    number(nameOrNumber) {
        return typeof nameOrNumber === "number" ? nameOrNumber : this.numbers.get(nameOrNumber);
    }
    takeAll() {
        const names = [...this.numbers.keys()];
        this.clear();
        return names;
    }
}

// ---- waiting, with a deadline and an AbortSignal

const abortReason = signal => signal.reason || new SmqError("aborted", "the signal was aborted"); // no reason: an old browser

function throwIfAborted(signal) {
    if (signal && signal.aborted) throw abortReason(signal);
}

/** Calls `fn(reason)` when `signal`, which may be undefined, is aborted. Returns a function that ends this. */
function onAbort(signal, fn) {
    if (!signal) return () => {};
    const listener = () => fn(abortReason(signal));
    signal.addEventListener("abort", listener);
    return () => signal.removeEventListener("abort", listener);
}

/** A promise that also ends at a deadline and with a signal. `onend` is called once, however it ends. */
class Waiter {
    constructor(what, {timeout, signal}, onend) {
        this.promise = new Promise((resolve, reject) => { this.settle = {resolve, reject}; });
        this.onend = onend;
        this.timer = 0;
        this.unlisten = onAbort(signal, reason => this.reject(reason));
        if (timeout === undefined) return;
        const late = () => this.reject(new SmqError("timeout", `${what} in ${timeout} ms`));
        this.timer = setTimeout(late, Math.min(timeout, MAX_TIMER_MS));
    }
    resolve(value) {
        this.end();
        this.settle.resolve(value);
    }
    reject(error) {
        this.end();
        this.settle.reject(error);
    }
    end() {
        clearTimeout(this.timer);
        this.unlisten();
        if (this.onend) this.onend();
        this.onend = null;
    }
}

/** The calls that wait for one event of a client, such as its connection. */
class Waiters {
    constructor() {
        this.open = new Set();
    }
    wait(what, options) {
        const waiter = new Waiter(what, options, () => this.open.delete(waiter));
        this.open.add(waiter);
        return waiter.promise;
    }
    resolve(value) {
        for (const waiter of [...this.open]) waiter.resolve(value);
    }
    reject(error) {
        for (const waiter of [...this.open]) waiter.reject(error);
    }
}

// ---- messages of request() and messages()

/** A received message; `text` and `json` decode its data, and throw if that is impossible. */
class Message {
    constructor(data, etid, tid, subtid, topic, subtopic, publish) {
        Object.assign(this, {data, etid, tid, subtid, topic, subtopic});
        Object.defineProperty(this, "publish", {value: publish});
    }
    get text() {
        return utf8.decode(this.data);
    }
    get json() {
        return JSON.parse(this.text);
    }
    reply(data) { // to the publisher, with the sub-topic of this message; returns whether it was sent or queued
        return this.publish(toPayload(data), this.etid, this.subtid);
    }
}

/** The messages of one topic, for `for await`. When too many wait, the oldest are dropped and counted. */
class MessageStream {
    constructor(topic, {subtopic, limit, signal}, onend) {
        Object.assign(this, {topic, subtopic, dropped: 0});
        const state = {limit: limit === undefined ? STREAM_MESSAGES : limit, bytes: 0, queue: [], readers: [], onend};
        if (!(state.limit >= 1)) throw new RangeError(`SMQ: the limit of messages() is a number from 1, not ${limit}`);
        Object.defineProperty(this, "state", {value: state});
        this.subscribed = new Promise(resolve => { state.accept = resolve; });
        state.unlisten = onAbort(signal, reason => this.end(reason, true));
        if (signal && signal.aborted) this.end(abortReason(signal), true);
    }
    [Symbol.asyncIterator]() {
        return this;
    }
    next() {
        const {queue, readers} = this.state;
        if (queue.length) {
            this.state.bytes -= queue[0].data.length;
            return Promise.resolve({value: queue.shift(), done: false});
        }
        if (!this.state.ended) return new Promise((resolve, reject) => readers.push({resolve, reject}));
        const {error} = this.state;
        this.state.error = undefined; // the error once, then the end
        return error === undefined ? Promise.resolve({value: undefined, done: true}) : Promise.reject(error);
    }
    return(value) { // the loop has ended with break, return or an error
        this.end(undefined, true);
        this.state.error = undefined;
        return Promise.resolve({value, done: true});
    }
    push(message) {
        const {state} = this, {queue, readers} = state;
        if (readers.length) return readers.shift().resolve({value: message, done: false});
        queue.push(message);
        state.bytes += message.data.length;
        while (queue.length > state.limit || state.bytes > STREAM_BYTES) {
            state.bytes -= queue.shift().data.length;
            this.dropped += 1;
        }
    }
    end(error, discards) { // waiting messages are still delivered, unless `discards`
        const {state} = this;
        if (discards) [state.queue, state.bytes] = [[], 0];
        if (state.ended) return;
        state.ended = true;
        state.accept(false); // no effect on a stream that was subscribed
        state.unlisten();
        const readers = state.readers.splice(0);
        if (readers.length && error !== undefined) readers.shift().reject(error);
        else state.error = error;
        readers.forEach(reader => reader.resolve({value: undefined, done: true}));
        state.onend(this);
    }
}

/** Open requests: a reply comes from the etid that was asked, with the number of the request as its sub-topic. */
class Requests {
    constructor() {
        this.last = Math.floor(Math.random() * 0xFFFFFFFF); // random: a reply to an earlier page is no reply to this one
        this.asked = new Map(); // number -> {etid, item, waiter}; without a waiter: ended
        this.ended = [];
    }
    get open() {
        return this.asked.size - this.ended.length;
    }
    add(etid, item, options, onend) {
        do this.last = this.last % 0xFFFFFFFF + 1; while (this.asked.has(this.last));
        const number = item.subtopic = this.last, request = {etid, item};
        request.waiter = new Waiter(`no reply from ${etid}`, options, () => {
            request.waiter = null;
            onend();
            if (this.ended.push(number) > MAX_ENDED_REQUESTS) this.asked.delete(this.ended.shift());
        });
        this.asked.set(number, request);
        return request.waiter;
    }
    take(message) { // returns whether the message is a reply; a late one is discarded
        const request = this.asked.get(message.subtid);
        if (!request || request.etid !== message.etid) return false;
        if (request.waiter) request.waiter.resolve(message);
        return true;
    }
    fail(error, concerns = () => true) {
        for (const {item, waiter} of [...this.asked.values()]) {
            if (waiter && concerns(item)) waiter.reject(error);
        }
    }
}

// ---- the client

/** Calls `wake` when the page becomes visible, and when the network comes or goes. Returns a function that ends this. */
function onWake(wake) {
    const page = typeof document === "undefined" ? null : document;
    const hasEvents = typeof globalThis.addEventListener === "function"; // not in Node.js
    const whenVisible = () => page.visibilityState === "visible" && wake();
    if (page) page.addEventListener("visibilitychange", whenVisible);
    if (hasEvents) ["online", "offline"].forEach(name => globalThis.addEventListener(name, wake));
    return () => {
        if (page) page.removeEventListener("visibilitychange", whenVisible);
        if (hasEvents) ["online", "offline"].forEach(name => globalThis.removeEventListener(name, wake));
    };
}

function checked(given, defaults) { // the options, with defaults; throws a RangeError that names the wrong one
    const opt = Object.assign({}, given);
    for (const name of Object.keys(defaults)) if (opt[name] === undefined) opt[name] = defaults[name];
    if (opt.uid && typeof opt.uid !== "string") throw new TypeError(`SMQ: a uid is text, not ${typeof opt.uid}: ${opt.uid}`);
    const uidBytes = opt.uid ? utf8.length(opt.uid) : MIN_UID_BYTES, infoBytes = utf8.length(String(opt.info || ""));
    if (uidBytes < MIN_UID_BYTES || uidBytes > MAX_COUNTED_BYTES) throw new RangeError("SMQ: a uid has 6 to 255 bytes: " + opt.uid);
    if (infoBytes > MAX_INFO_BYTES) throw new RangeError(`SMQ: info has at most ${MAX_INFO_BYTES} bytes, not ${infoBytes}`);
    for (const name of ["reconnectDelay", "reconnectDelayMax", "pong", "queueMessages", "queueBytes"]) {
        if (!(opt[name] > 0)) throw new RangeError(`SMQ: ${name} is a number above 0, not ${opt[name]}`);
    }
    if (!(opt.ping >= 0)) throw new RangeError(`SMQ: ping is a number of ms, 0 for no pings, not ${opt.ping}`);
    if (!["newest", "oldest"].includes(opt.queuePolicy)) {
        throw new RangeError(`SMQ: queuePolicy is "newest" or "oldest", the messages that a full queue drops, not ${opt.queuePolicy}`);
    }
    opt.timeout = opt.timeout > 0 ? Math.min(opt.timeout, MAX_TIMER_MS) : DEFAULTS.timeout;
    opt.WebSocket = opt.WebSocket || globalThis.WebSocket;
    if (!opt.WebSocket) throw new Error("SMQ: no WebSocket here: use Node.js 22 or newer, or pass a class as the option WebSocket");
    return opt;
}

function checkName(name, what) { // a wrong one would wait for its number in front of all other messages
    if (typeof name === "number") return;
    if (typeof name !== "string") throw new TypeError(`SMQ: a ${what} is a name or a number, not ${String(name)}`);
    const bytes = name.length * 3 > MAX_NAME_BYTES ? utf8.length(name) : 0; // a character of a string has at most 3 bytes
    if (bytes > MAX_NAME_BYTES) throw new RangeError(`SMQ: a ${what} has at most ${MAX_NAME_BYTES} bytes, not ${bytes}`);
}

/** Makes `self` a client. Its state is in this function, so that methods also work when they are passed on alone. */
function start(self, url, given, defaults) {
    if (typeof url === "object" && url !== null && !(url instanceof URL)) [url, given] = [undefined, url];
    const opt = checked(given, defaults), address = socketURL(url), Socket = opt.WebSocket;
    for (const name of CALLBACKS) self[name] = opt[name] || null;
    const topics = new Names(), subtopics = new Names();
    const subscriptions = new Map(); // topic -> Map(subtopic, or null for all others -> {onmsg, datatype})
    const streams = new Map();       // topic -> Set(MessageStream)
    const observers = new Map();     // topic or etid -> function
    let pending = [];                // sent or queued, not yet acknowledged: {kind, name, done, restores}
    const held = new Set();          // messages that wait for a connection, or for the numbers of their names
    let heldBytes = 0, dropped = 0;
    const requests = new Requests(), connecting = new Waiters(), closings = new Waiters(), watchers = new Set();
    let sock = null, etid = 0, seed = 0, ownAddress = "", uid = opt.uid, state = "connecting";
    let connectedBefore = false, restoring = false, retryTimer = 0, openTimer = 0;
    let failures = 0, openedAt = 0;  // attempts since the last stable connection; when the last one began
    let heardAt = 0, pingTimer = 0, pongTimer = 0;
    let pongs = [];                  // what the next Pongs confirm: functions
    let sent = 0, confirmed = 0;     // messages of this connection; a Pong confirms those sent before its Ping
    let closing = null;              // after disconnect(): {promise, resolve, timer, pinged}
    let ended = false, reason = "";  // ended permanently: nothing can be sent
    let isDelivered = true;          // at the end: whether the broker has received all messages
    let hasWarned = false;           // that the first attempt has failed

    // -- connecting

    function open() {
        let opened = false; // whether this connection was accepted
        const ws = sock = new Socket(address);
        ws.binaryType = "arraybuffer";
        sent = confirmed = 0;
        openedAt = performance.now();
        retryTimer = 0;
        clearTimeout(openTimer);
        openTimer = setTimeout(() => ws === sock && lost("timeout", true), opt.timeout);
        ws.onmessage = event => {
            if (ws !== sock) return;
            try {
                const bytes = typeof event.data === "string" ? utf8.encode(event.data) : new Uint8Array(event.data);
                if (bytes.length > MAX_PACKET_BYTES) throw new Error("packet of " + bytes.length + " bytes");
                heardAt = performance.now();
                receive(bytes, new DataView(bytes.buffer, bytes.byteOffset));
            } catch (error) {
                console.error("SMQ: protocol error", error);
                lost("protocolerror", true);
            }
            opened = opened || etid !== 0;
        };
        ws.onclose = ws.onerror = () => { // after an error, Node.js 22 does not always call onclose
            if (ws === sock) lost(opened ? "connection closed" : "cannot connect", true);
        };
        setState("connecting");
    }

    function setState(value) {
        if (value === state) return;
        state = value;
        for (const listener of [self.onstate, ...watchers]) call(listener, state);
    }

    function lost(message, canReconnect) {
        const ws = sock;
        sock = null;
        [openTimer, pingTimer, pongTimer].forEach(clearTimeout);
        pongTimer = 0;
        pongs = [];
        if (etid && performance.now() - openedAt >= STABLE_MS) failures = 0;
        forget();
        if (ws) ws.close();
        setState("offline");
        if (ended || sock) return;
        const answer = closing ? held.size > 0 && canReconnect && MIN_RETRY_MS : call(self.onclose, message, canReconnect);
        if (ended || sock) return; // onclose has called disconnect()
        const ms = retryDelay(answer, canReconnect);
        if (!(ms > 0)) return end(message);
        retryTimer = setTimeout(open, Math.min(MAX_TIMER_MS, ms));
        const isWatched = closing || self.onclose || self.onstate || watchers.size > 0;
        if (connectedBefore || hasWarned || isWatched) return;
        hasWarned = true; // without it, a program with a wrong address would wait without a sign
        console.warn(`SMQ: ${address}: ${message}. The client tries again until it is closed.`);
    }

    function retryDelay(answer, canReconnect) { // of onclose; 0 for the end
        if (typeof answer === "number" && answer > 0) return Math.max(MIN_RETRY_MS, answer * (0.75 + Math.random() / 2));
        if (!opt.reconnect || answer === false || answer === 0 || !(canReconnect || answer === true)) return 0;
        const ceiling = Math.min(opt.reconnectDelayMax, opt.reconnectDelay * 2 ** failures++);
        return ceiling * (1 - Math.random() / 2); // clients of a restarted server do not all come at once
    }

    function wake() { // the page is visible again, or the network has changed
        if (ended || closing) return;
        if (etid) return probe(WAKE_PONG_MS);
        if (!retryTimer || (typeof navigator !== "undefined" && navigator.onLine === false)) return;
        clearTimeout(retryTimer);
        failures = 0;
        retryTimer = setTimeout(open, Math.max(0, MIN_RETRY_MS - (performance.now() - openedAt)));
    }

    function probe(ms) { // a connection can be dead without a sign, for example after sleep
        if (pongTimer) return;
        const askedAt = performance.now();
        const stop = () => {
            clearTimeout(pongTimer);
            pongTimer = 0;
        };
        pongTimer = setTimeout(() => heardAt < askedAt ? lost("pong", true) : stop(), Math.min(ms, MAX_TIMER_MS));
        confirm(stop);
    }

    function confirm(done) { // the broker responds in order: its Pong confirms all earlier packets
        const before = sent;
        pongs.push(() => {
            confirmed = before;
            done();
        });
        sock.send(packet(PING));
    }

    function watchSilence() {
        if (!opt.ping) return;
        const silent = performance.now() - heardAt;
        if (silent >= opt.ping) probe(opt.pong);
        pingTimer = setTimeout(watchSilence, Math.min(MAX_TIMER_MS, silent < opt.ping ? opt.ping - silent : opt.ping));
    }

    function end(why) { // permanently; open requests are denied
        const [unsent, unanswered] = [held.size, pending];
        ended = true;
        reason = why;
        isDelivered = !unsent && confirmed === sent;
        clearTimeout(retryTimer);
        clearTimeout(openTimer);
        stopListening();
        clearHeld();
        pending = [];
        if (sock) lost(why, false);
        setState("offline");
        if (unsent) console.warn(`SMQ: ended before ${unsent} messages were sent: ${why}`);
        const error = closedError();
        requests.fail(error);
        connecting.reject(error);
        closings.resolve(why);
        for (const stream of allStreams()) stream.end(closing ? undefined : error);
        unanswered.forEach(({done}) => done && done(0));
        if (!closing) return;
        clearTimeout(closing.timer);
        closing.resolve(isDelivered);
    }

    const closedError = () => new SmqError("closed", `the client has ended: ${reason || "disconnect() was called"}`);
    const allStreams = () => [...streams.values()].reduce((all, some) => all.concat([...some]), []);

    function clearHeld() {
        dropped += held.size;
        held.clear();
        heldBytes = 0;
    }

    function pingIfDrained() {
        if (!closing || closing.pinged || ended || held.size) return;
        if (!etid) return end("disconnected");
        closing.pinged = true;
        confirm(sendDisconnect);
    }

    function sendDisconnect() {
        sock.send(packet(DISCONNECT));
        end("disconnected");
    }

    function forget() { // numbers are valid for one connection; pending names are sent again
        const wasConnected = etid !== 0, known = new Set();
        etid = 0;
        if (!wasConnected || ended) return;
        const error = new SmqError("lost", "the connection was lost before the reply");
        requests.fail(error, item => opt.cleanstart || !held.has(item));
        if (opt.cleanstart) {
            const unanswered = pending;
            for (const names of [topics, subtopics, subscriptions, observers]) names.clear();
            pending = [];
            clearHeld();
            for (const stream of allStreams()) stream.end(new SmqError("lost", "the connection was lost (cleanstart)"));
            return unanswered.forEach(({done}) => done && done(0));
        }
        const open = pending.filter(request => !request.restores);
        const plan = [...subtopics.takeAll().map(name => [CREATESUB, name]),
            ...topics.takeAll().filter(name => !isSubscribed(name)).map(name => [CREATE, name]),
            ...[...subscriptions.keys(), ...streams.keys()].filter(onWire).map(name => [SUBSCRIBE, name]),
            ...pending.filter(request => request.restores).map(request => [request.kind, request.name])];
        const isNew = (kind, name) => !known.has(kind + name) && known.add(kind + name);
        open.forEach(request => isNew(request.kind, request.name));
        pending = plan.filter(([kind, name]) => isNew(kind, name)).map(([kind, name]) => ({kind, name, restores: true}))
            .concat(open);
    }

    const onWire = topic => typeof topic === "string" && topic !== SELF;
    const isSubscribed = topic => subscriptions.has(topic) || streams.has(topic);

    // -- packets in

    function receive(bytes, view) {
        const tail = at => lenientDecoder.decode(bytes.subarray(at));
        switch (bytes[0]) {
        case INIT:
            if (bytes[1] !== VERSION) return lost(REFUSALS[1], false);
            return greet(view.getUint32(2), tail(6));
        case CONNACK:
            if (bytes[1] === 0) return accepted(view.getUint32(2));
            return lost(tail(6) || REFUSALS[bytes[1]] || "refused", bytes[1] === SERVER_UNAVAILABLE);
        case SUBACK:
            return acked(SUBSCRIBE, tail(6), bytes[1] === 0 ? view.getUint32(2) : 0);
        case CREATEACK:
            return acked(CREATE, tail(6), bytes[1] === 0 ? view.getUint32(2) : 0);
        case CREATESUBACK:
            return acked(CREATESUB, tail(6), bytes[1] === 0 ? view.getUint32(2) : 0);
        case PUBLISH:
            return message(bytes.slice(13), view.getUint32(5), view.getUint32(1), view.getUint32(9));
        case CHANGE:
            return changed(view.getUint32(1), view.getUint32(5));
        case PING:
            return sock.bufferedAmount < MAX_PONGS_BYTES && sock.send(packet(PONG));
        case PONG:
            return pongs.length && pongs.shift()();
        case DISCONNECT:
            return lost(tail(1), tail(1) === RESTART);
        default:
            throw new Error("packet type " + bytes[0]);
        }
    }

    function greet(rnd, ip) {
        const ws = sock;
        [seed, ownAddress] = [rnd, ip];
        uid = uid || ip.slice(0, 200) + "-" + rnd.toString(16);
        const failed = error => {
            console.error(error);
            if (ws === sock) lost("onauth failed", false);
        };
        try {
            const answer = self.onauth ? self.onauth(rnd, ip) : "";
            if (!answer || typeof answer.then !== "function") connect(answer || "");
            else Promise.resolve(answer).then(credentials => ws === sock && connect(credentials || "")).catch(failed);
        } catch (error) { // of onauth, or credentials that are neither text nor bytes
            failed(error);
        }
    }

    function connect(credentials) {
        if (toBytes(credentials).length > MAX_COUNTED_BYTES) return lost("credentials over 255 bytes", false);
        if (sock) sock.send(packet(CONNECT, [VERSION], counted(uid), counted(credentials), String(opt.info || "")));
    }

    function accepted(newEtid) {
        clearTimeout(openTimer);
        etid = newEtid;
        restoring = true;
        const waiting = pending;
        pending = [];
        waiting.forEach(issue);
        for (const topic of observers.keys()) {
            if (typeof topic === "number") sock.send(packet(OBSERVE, topic));
        }
        watchSilence();
        progress();
    }

    function message(data, ptid, tid, subtid) {
        const name = tid === etid ? SELF : topics.names.get(tid);
        const made = () => new Message(data, ptid, tid, subtid, name || tid, subtopics.names.get(subtid), self.publish);
        if (name === SELF && subtid && requests.asked.size && requests.take(made())) return;
        const isTaken = streams.size > 0 && feedStreams(name, tid, subtid, made);
        const settings = findHandler(name, tid, subtid);
        if (!settings) return isTaken || call(self.onmsg, data, ptid, tid, subtid);
        let value = data;
        try {
            if (settings.datatype) value = utf8.decode(data);
            if (settings.datatype === "json") value = JSON.parse(value);
        } catch (error) {
            console.warn(`SMQ: a message for ${topics.names.get(tid) || tid} is not ${settings.datatype}:`, error.message);
            return call(self.onmsg, data, ptid, tid, subtid);
        }
        call(settings.onmsg, value, ptid, tid, subtid);
    }

    function feedStreams(name, tid, subtid, made) {
        const subtopic = subtopics.names.get(subtid);
        const isFor = stream => stream.subtopic === undefined || stream.subtopic === subtopic || stream.subtopic === subtid;
        const takers = [...streams.get(name) || streams.get(tid) || []].filter(isFor);
        takers.forEach(stream => stream.push(made()));
        return takers.length > 0;
    }

    function findHandler(name, tid, subtid) {
        const handlers = subscriptions.get(name) || subscriptions.get(tid) || new Map();
        const candidates = [handlers.get(subtopics.names.get(subtid)), handlers.get(subtid), handlers.get(null)];
        return candidates.find(settings => settings && settings.onmsg);
    }

    function changed(tid, subscribers) {
        const name = topics.names.get(tid);
        const topic = observers.has(name) ? name : tid;
        const onchange = observers.get(topic);
        if (topic === tid && name === undefined && subscribers === 0) observers.delete(tid); // the client has disconnected
        call(onchange, subscribers, topic);
    }

    // -- names, and the acknowledgements with their numbers

    function ask(kind, name, done) {
        if (pending.length < MAX_PENDING_NAMES) issue({kind, name, done});
        else if (done) setTimeout(done, 0, 0);
    }

    function issue(request) {
        if (ended) return request.done && setTimeout(request.done, 0, 0);
        if (request.kind === 0 && etid) return request.done(0); // concerns only this client
        pending.push(request);
        if (etid) sock.send(packet(request.kind, request.name));
    }

    function acked(kind, name, number) {
        const index = pending.findIndex(request => request.kind === kind && request.name === name);
        if (index < 0) return; // an acknowledgement without a request
        const [request] = pending.splice(index, 1);
        if (number) learn(kind, name, number);
        else denied(kind, name);
        if (request.done) request.done(number);
        progress();
    }

    function denied(kind, name) {
        const concerns = ({topic, subtopic}) => name === (kind === CREATESUB ? subtopic : topic);
        const streamsOfName = kind === CREATE ? [] : allStreams().filter(concerns);
        if (kind !== SUBSCRIBE) drop(concerns, name);
        else if ([...held].some(({topic}) => topic === name)) resolve(CREATE, name);
        streamsOfName.forEach(stream => stream.end(new SmqError("denied", `the broker denied ${name}`)));
    }

    function drop(isRefused, name) {
        const refused = [...held].filter(isRefused);
        if (refused.length) console.warn(`SMQ: the broker denied ${name}: ${refused.length} messages dropped`);
        dropped += refused.length;
        refused.forEach(unhold);
    }

    function unhold(item) {
        if (held.delete(item)) heldBytes -= item.data.length;
    }

    function learn(kind, name, number) {
        if (kind === CREATESUB) return subtopics.add(name, number);
        const isNew = topics.add(name, number), isUnused = kind === SUBSCRIBE && !isSubscribed(name);
        if (isUnused) sock.send(packet(UNSUBSCRIBE, number)); // unsubscribed before the acknowledgement
        if (isNew && observers.has(name)) sock.send(packet(OBSERVE, number));
    }

    function resolve(kind, name) { // requests the number of a name, once
        const known = (kind === CREATE ? topics : subtopics).numbers.has(name);
        if (!known && !pending.some(request => request.kind === kind && request.name === name)) ask(kind, name);
    }

    function progress() {
        for (const item of held) {
            if (!send(item)) break;
            unhold(item);
        }
        pingIfDrained();
        if (!restoring || !etid || (pending.length && pending[0].restores)) return;
        restoring = false;
        const again = connectedBefore;
        connectedBefore = true;
        if (closing) return;
        setState("online");
        connecting.resolve(etid);
        call(again ? self.onreconnect : self.onconnect, etid, seed, ownAddress);
    }

    function send({data, topic, subtopic}) {
        const tid = topic === SELF ? etid : topics.number(topic), stid = subtopics.number(subtopic || 0);
        if (!etid || tid === undefined || stid === undefined) return false;
        sock.send(packet(PUBLISH, tid, etid, stid, data));
        sent += 1;
        return true;
    }

    function enqueue(item) { // sends or queues a message; returns false for a dropped one
        const {data, topic, subtopic} = item;
        if (data.length > MAX_PAYLOAD_BYTES) throw new RangeError(`SMQ: a message has at most 65520 bytes, not ${data.length}`);
        checkName(topic, "topic");
        if (subtopic !== undefined && subtopic !== null) checkName(subtopic, "sub-topic");
        const isOpen = !closing && !ended && data.length <= opt.queueBytes && pending.length < MAX_PENDING_NAMES;
        const isFull = () => heldBytes + (sock ? sock.bufferedAmount : 0) + data.length > opt.queueBytes;
        if (isOpen && !held.size && !isFull() && send(item)) return true;
        const exceedsQueue = () => held.size >= opt.queueMessages || heldBytes + data.length > opt.queueBytes;
        while (isOpen && opt.queuePolicy === "oldest" && held.size && exceedsQueue()) dropOldest();
        if (!isOpen || exceedsQueue() || isFull()) {
            dropped += 1;
            return false;
        }
        held.add(item);
        heldBytes += data.length;
        if (onWire(topic)) resolve(CREATE, topic);
        if (typeof subtopic === "string") resolve(CREATESUB, subtopic);
        return true;
    }

    function dropOldest() {
        const [item] = held;
        unhold(item);
        dropped += 1;
        requests.fail(new SmqError("full", "the queue is full: the oldest messages were dropped"), one => one === item);
    }

    // -- the methods

    self.publish = (data, topic, subtopic) => enqueue({data: toBytes(data), topic, subtopic});

    self.pubjson = (value, topic, subtopic) => self.publish(toJson(value), topic, subtopic);

    // Sends a request to the client `to` (1: the server). The promise resolves to its reply.
    self.request = async (to, data, options) => {
        const {timeout = opt.timeout, signal} = options || {};
        if (typeof to !== "number") throw new TypeError(`SMQ: a request goes to an etid, a number, not ${to}`);
        throwIfAborted(signal);
        if (closing || ended) throw closedError();
        if (requests.open >= MAX_REQUESTS) throw new SmqError("full", `${MAX_REQUESTS} requests have no reply yet`);
        const item = {data: toBytes(toPayload(data)), topic: to};
        const waiter = requests.add(to, item, {timeout, signal}, () => unhold(item));
        try {
            if (!enqueue(item)) waiter.reject(new SmqError("full", "the queue is full: the request was not sent"));
        } catch (error) { // too large
            waiter.reject(error);
        }
        return waiter.promise;
    };

    self.create = (topic, subtopic, onack) => {
        if (typeof subtopic === "function") [subtopic, onack] = [undefined, subtopic];
        if (subtopic === undefined) return number(CREATE, topic, tid => call(onack, tid !== 0, topic, tid));
        return number(CREATE, topic, tid => number(CREATESUB, subtopic, stid => {
            call(onack, tid !== 0 && stid !== 0, topic, tid, subtopic, stid);
        }));
    };

    self.createsub = (subtopic, onack) => number(CREATESUB, subtopic, stid => call(onack, stid !== 0, subtopic, stid));

    function number(kind, name, done) { // known numbers need no round trip; the promise resolves to the number, 0 when denied
        return new Promise(resolved => {
            checkName(name, kind === CREATE ? "topic" : "sub-topic");
            const known = (kind === CREATE ? topics : subtopics).number(name);
            const finish = value => {
                resolved(value);
                done(value);
            };
            if (known === undefined) ask(kind, name, finish);
            else finish(known);
        });
    }

    self.subscribe = (topic, subtopic, settings) => new Promise(resolved => { // to the topic's number, 0 when denied
        if (typeof subtopic === "object" && subtopic !== null) [subtopic, settings] = [undefined, subtopic];
        settings = settings || {};
        const key = subtopic === undefined || subtopic === null || subtopic === 0 ? null : subtopic;
        checkName(topic, "topic");
        if (key !== null) checkName(key, "sub-topic");
        if (!subscriptions.has(topic)) subscriptions.set(topic, new Map());
        subscriptions.get(topic).set(key, settings);

        const finish = tid => {
            const stid = key === null ? 0 : subtopics.number(key);
            const extra = key === null ? [] : [key, stid || 0];
            const isAccepted = tid !== 0 && stid !== undefined;
            if (!isAccepted) withdraw(topic, key);
            resolved(isAccepted ? tid : 0);
            call(settings.onack, isAccepted, topic, stid === undefined ? 0 : tid, ...extra);
        };
        const local = () => finish(topic === SELF ? etid : topic);
        const newSubtopic = typeof key === "string" && subtopics.number(key) === undefined;
        if (newSubtopic) ask(CREATESUB, key, onWire(topic) ? undefined : local);
        if (onWire(topic)) ask(SUBSCRIBE, topic, finish);
        else if (!newSubtopic) issue({kind: 0, name: "", done: local});
    });

    function withdraw(topic, key) {
        const handlers = subscriptions.get(topic);
        if (!handlers || !handlers.delete(key) || handlers.size) return;
        subscriptions.delete(topic);
        unsubscribeUnused(topic);
    }

    function unsubscribeUnused(topic) {
        const tid = onWire(topic) ? topics.number(topic) : undefined;
        if (!isSubscribed(topic) && etid && tid !== undefined) sock.send(packet(UNSUBSCRIBE, tid));
    }

    // The messages of a topic, for `for await`. The subscription begins with this call and ends with the loop.
    self.messages = (topic, options) => {
        checkName(topic, "topic");
        const {subtopic} = options || {};
        if (subtopic !== undefined) checkName(subtopic, "sub-topic");
        const answered = tid => {
            if (tid) stream.state.accept(true);
            else stream.end(new SmqError("denied", `the subscription of ${topic} was denied`));
        };
        const stream = new MessageStream(topic, options || {}, endedStream => {
            const others = streams.get(topic);
            if (!others || !others.delete(endedStream)) return;
            if (!etid) pending = pending.filter(({done}) => done !== answered); // not sent yet
            if (others.size) return;
            streams.delete(topic);
            unsubscribeUnused(topic);
        });
        if (closing || ended) stream.end(closedError());
        if (stream.state.ended) return stream; // or its signal was aborted before
        if (!streams.has(topic)) streams.set(topic, new Set());
        streams.get(topic).add(stream);
        if (typeof subtopic === "string") resolve(CREATESUB, subtopic);
        if (onWire(topic)) ask(SUBSCRIBE, topic, answered);
        else answered(1); // own messages, and those of a number, need no answer of the broker
        return stream;
    };

    self.unsubscribe = topic => {
        const loops = [...streams.get(topic) || []];
        subscriptions.delete(topic);
        loops.forEach(stream => stream.end()); // the last one unsubscribes
        if (!loops.length) unsubscribeUnused(topic);
    };

    self.observe = (topic, onchange) => {
        checkName(topic, "topic");
        if (topic === SELF || topic === etid) return;
        observers.set(topic, onchange);
        const tid = topics.number(topic);
        if (tid === undefined) resolve(CREATE, topic);
        else if (etid) sock.send(packet(OBSERVE, tid));
    };

    self.unobserve = topic => {
        const tid = topics.number(topic);
        if (observers.delete(topic) && etid && tid !== undefined) sock.send(packet(UNOBSERVE, tid));
    };

    self.gettid = () => etid || undefined;
    self.getsock = () => sock;
    self.topic2tid = topic => topics.numbers.get(topic);
    self.tid2topic = tid => topics.names.get(tid);
    self.subtopic2tid = subtopic => subtopics.numbers.get(subtopic);
    self.tid2subtopic = stid => subtopics.names.get(stid);

    self.waitConnected = async (options = {}) => {
        throwIfAborted(options.signal);
        if (ended || closing) throw closedError();
        return state === "online" ? etid : connecting.wait("not connected", options);
    };

    self.waitClosed = async (options = {}) => {
        throwIfAborted(options.signal);
        return ended ? reason : closings.wait("not closed", options);
    };

    self.watchState = listener => { // calls it at each change; returns a function that ends this
        const watcher = value => listener(value);
        watchers.add(watcher);
        return () => { watchers.delete(watcher); };
    };

    // Sends the queued messages, then ends permanently without calling onclose. The promise resolves to whether the broker has
    // received all messages.
    self.disconnect = () => {
        if (closing) return closing.promise;
        if (ended) return Promise.resolve(isDelivered);
        closing = {pinged: false};
        closing.promise = new Promise(resolve => { closing.resolve = resolve; });
        closing.timer = setTimeout(end, opt.timeout, "the time limit was reached");
        clearTimeout(retryTimer);
        if (!sock && held.size) open();
        pingIfDrained();
        return closing.promise;
    };

    self.close = () => self.disconnect().then(isComplete => {
        if (!isComplete) throw new SmqError("undelivered", "the broker has not confirmed all messages");
    });

    const visible = {
        state: () => state, ready: () => self.waitConnected(), closed: () => ended, closeReason: () => reason,
        backlog: () => held.size, backlogBytes: () => heldBytes + (sock ? sock.bufferedAmount : 0), dropped: () => dropped,
    };
    for (const name of Object.keys(visible)) Object.defineProperty(self, name, {get: visible[name], enumerable: name !== "ready"});

    const isAborted = Boolean(opt.signal && opt.signal.aborted);
    if (!isAborted) open(); // throws for a wrong address, before listeners are added
    const stopWaking = opt.reconnect ? onWake(wake) : () => {};
    const stopAborting = onAbort(opt.signal, () => ended || end("aborted"));
    function stopListening() {
        stopWaking();
        stopAborting();
    }
    if (isAborted) end("aborted");
}

/** A client that reconnects by itself. See smq.d.ts for its options and methods. */
class SmqClient {
    constructor(url, options) {
        start(this, url, options, DEFAULTS);
    }
}

/** A client as `SMQ.Client` has always been: it reconnects if `onclose` returns a number of ms, and sends no pings. */
function Client(url, opt) {
    const self = Object.create(SmqClient.prototype);
    start(self, url, opt, CLIENT_DEFAULTS);
    return self;
}

// ---- addresses

function wsURL(path) { // the page's host and port; a relative path starts from the page's folder
    if (typeof location === "undefined") throw new Error("SMQ: without a page there is no address: give the client a URL");
    if (!location.host) throw new Error(`SMQ: a page of ${location.protocol} has no host: give the client a URL`); // a file
    const page = location.pathname;
    if (path === undefined || path === null) path = page;
    if (path[0] !== "/") path = page.slice(0, page.lastIndexOf("/") + 1) + path;
    return (location.protocol === "https:" ? "wss://" : "ws://") + location.host + path;
}

function socketURL(url) { // http: and https: as ws: and wss:; a path is on the page's host
    const text = url ? String(url) : "";
    if (/^https?:/i.test(text)) return "ws" + text.slice(4);
    return /^[a-z]+:/i.test(text) ? text : wsURL(text || undefined);
}

const websocket = () => "WebSocket" in globalThis;

export {Client, SmqClient, SmqError, utf8, websocket, wsURL};
