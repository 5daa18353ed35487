/* SMQ client for browsers: publish and subscribe over a WebSocket.
 *
 *     const smq = SMQ.Client(SMQ.wsURL("smq.lsp"));
 *     smq.onclose = (message, canreconnect) => canreconnect ? 3000 : 0;
 *     smq.subscribe("greeting", {datatype: "text", onmsg: (text, ptid) => console.log(text)});
 *     smq.publish("hello", "greeting");
 *
 * All methods may be called at any time; messages and requests are queued while there is no connection. After a reconnect, topics
 * are numbered, subscribed and observed again before onreconnect is called, unless the option cleanstart is true. disconnect()
 * first sends the queued messages; its promise resolves to whether the broker has received them.
 *
 * Terms: tid = topic id, etid = the id of this client, to which other clients can send, ptid = the publisher's etid,
 * subtid = sub-topic id (0 = none).
 */
"use strict";

window.SMQ = (() => {
    const INIT = 1, CONNECT = 2, CONNACK = 3, SUBSCRIBE = 4, SUBACK = 5, CREATE = 6, CREATEACK = 7, PUBLISH = 8, UNSUBSCRIBE = 9,
        DISCONNECT = 11, PING = 12, PONG = 13, OBSERVE = 14, UNOBSERVE = 15, CHANGE = 16, CREATESUB = 17, CREATESUBACK = 18;
    const VERSION = 1, SELF = "self";
    const MAX_PAYLOAD_BYTES = 0xFFF0, MIN_UID_BYTES = 6, MAX_COUNTED_BYTES = 255, MIN_RETRY_MS = 1000;
    const MAX_HELD_MESSAGES = 10000, MAX_WAITING_BYTES = 16 * 1024 * 1024, MAX_PACKET_BYTES = 0xFFFF;
    const DEFAULT_TIMEOUT_MS = 10000, MAX_TIMER_MS = 0x7FFFFFFF; // a longer timer fires at once
    const MAX_PONGS_BYTES = 65536; // of queued Pongs, for a broker that pings without reading
    const REFUSALS = ["", "protocol version not supported", "server unavailable", "incorrect credentials",
        "client certificate required", "client certificate not accepted", "access denied"];
    const SERVER_UNAVAILABLE = 2;
    const RESTART = "sysshutdown"; // the text of Disconnect at a shutdown; the server may start again

    // ---- bytes and text

    const encoder = new TextEncoder(), strictDecoder = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true}),
        lenientDecoder = new TextDecoder("utf-8", {ignoreBOM: true});

    const utf8 = {
        length: text => encoder.encode(text).length,
        encode: text => encoder.encode(text),
        decode: bytes => strictDecoder.decode(bytes), // throws when it is not UTF-8
    };

    const toBytes = data => typeof data === "string" ? utf8.encode(data) : Uint8Array.from(data);

    function packet(type, ...parts) { // a number becomes four bytes; other parts are text or bytes
        const chunks = parts.map(part => {
            if (typeof part !== "number") return toBytes(part);
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

    // ---- the client

    function Client(url, opt) {
        if (typeof url === "object" && url !== null) [url, opt] = [undefined, url];
        url = url || wsURL();
        opt = opt || {};
        const self = {onauth: null, onconnect: null, onreconnect: null, onclose: null, onmsg: null};
        const topics = new Names(), subtopics = new Names();
        const subscriptions = new Map(); // topic -> Map(subtopic, or null for all others -> {onmsg, datatype})
        const observers = new Map();     // topic or etid -> function
        let requests = [];               // sent or queued, not yet acknowledged: {kind, name, done, restores}
        let held = [];                   // messages that wait for a connection, or for the numbers of their names
        let heldBytes = 0;
        let sock = null, etid = 0, seed = 0, address = "", uid = opt.uid;
        let connectedBefore = false, restoring = false, retryTimer = 0, openTimer = 0;
        let unconfirmed = 0;             // sent messages that the broker has not confirmed
        let closing = null;              // after disconnect(): {promise, resolve, timer, pinged}
        let ended = false;               // ended permanently: nothing can be sent
        const timeoutMs = opt.timeout > 0 ? Math.min(opt.timeout, MAX_TIMER_MS) : DEFAULT_TIMEOUT_MS;

        if (uid && (toBytes(uid).length < MIN_UID_BYTES || toBytes(uid).length > MAX_COUNTED_BYTES)) {
            throw new RangeError("SMQ: a uid has 6 to 255 bytes: " + uid);
        }

        // -- connecting

        function open() {
            let opened = false; // whether this connection was accepted
            const ws = sock = new WebSocket(url);
            ws.binaryType = "arraybuffer";
            unconfirmed = 0;
            clearTimeout(openTimer);
            openTimer = setTimeout(() => ws === sock && lost("timeout", true), timeoutMs);
            ws.onmessage = event => {
                if (ws !== sock) return;
                try {
                    const bytes = typeof event.data === "string" ? utf8.encode(event.data) : new Uint8Array(event.data);
                    if (bytes.length > MAX_PACKET_BYTES) throw new Error("packet of " + bytes.length + " bytes");
                    receive(bytes, new DataView(bytes.buffer, bytes.byteOffset));
                } catch (error) {
                    console.error("SMQ: protocol error", error);
                    lost("protocolerror", true);
                }
                opened = opened || etid !== 0;
            };
            ws.onclose = () => {
                if (ws === sock) lost(opened ? "connection closed" : "cannot connect", true);
            };
        }

        function lost(message, canReconnect) {
            const ws = sock;
            sock = null;
            clearTimeout(openTimer);
            forget();
            if (ws) ws.close();
            if (ended) return;
            const ms = closing ? held.length && canReconnect && MIN_RETRY_MS : call(self.onclose, message, canReconnect);
            if (ended || sock) return; // onclose has called disconnect()
            if (typeof ms === "number" && ms > 0) {
                retryTimer = setTimeout(open, Math.min(MAX_TIMER_MS, Math.max(MIN_RETRY_MS, ms * (0.75 + Math.random() / 2))));
            } else end(message);
        }

        function end(why) { // permanently; open requests are denied
            const [unsent, unanswered] = [held.length, requests];
            ended = true;
            clearTimeout(retryTimer);
            clearTimeout(openTimer);
            [held, heldBytes, requests] = [[], 0, []];
            if (sock) lost(why, false);
            if (unsent) console.warn(`SMQ: ended before ${unsent} messages were sent: ${why}`);
            unanswered.forEach(pending => pending.done && pending.done(0));
            if (!closing) return;
            clearTimeout(closing.timer);
            closing.resolve(!unsent && !unconfirmed);
        }

        function pingIfDrained() { // the broker responds in order: its Pong confirms all messages
            if (!closing || closing.pinged || ended || held.length) return;
            if (!etid) return end("disconnected");
            closing.pinged = true;
            sock.send(packet(PING));
        }

        function sendDisconnect() {
            unconfirmed = 0;
            sock.send(packet(DISCONNECT));
            end("disconnected");
        }

        function forget() { // numbers are valid for one connection; requests are sent again
            if (etid && opt.cleanstart) {
                for (const names of [topics, subtopics, subscriptions, observers]) names.clear();
                requests = [];
                [held, heldBytes] = [[], 0];
            } else if (etid) {
                const open = requests.filter(request => !request.restores);
                const plan = [...subtopics.takeAll().map(name => [CREATESUB, name]),
                    ...topics.takeAll().filter(name => !subscriptions.has(name)).map(name => [CREATE, name]),
                    ...[...subscriptions.keys()].filter(onWire).map(name => [SUBSCRIBE, name]),
                    ...requests.filter(request => request.restores).map(request => [request.kind, request.name])];
                const known = new Set();
                const isNew = (kind, name) => !known.has(kind + name) && known.add(kind + name);
                open.forEach(request => isNew(request.kind, request.name));
                requests = plan.filter(([kind, name]) => isNew(kind, name)).map(([kind, name]) => ({kind, name, restores: true}))
                    .concat(open);
            }
            etid = 0;
        }

        const onWire = topic => typeof topic === "string" && topic !== SELF;

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
                return closing && closing.pinged && sendDisconnect();
            case DISCONNECT:
                return lost(tail(1), tail(1) === RESTART);
            default:
                throw new Error("packet type " + bytes[0]);
            }
        }

        function greet(rnd, ip) {
            [seed, address] = [rnd, ip];
            uid = uid || ip.slice(0, 200) + "-" + rnd.toString(16);
            const credentials = call(self.onauth, rnd, ip) || "";
            if (toBytes(credentials).length > MAX_COUNTED_BYTES) return lost("credentials over 255 bytes", false);
            if (sock) sock.send(packet(CONNECT, [VERSION], counted(uid), counted(credentials), String(opt.info || "")));
        }

        function accepted(newEtid) {
            clearTimeout(openTimer);
            etid = newEtid;
            restoring = true;
            const waiting = requests;
            requests = [];
            waiting.forEach(issue);
            for (const topic of observers.keys()) {
                if (typeof topic === "number") sock.send(packet(OBSERVE, topic));
            }
            progress();
        }

        function message(data, ptid, tid, subtid) {
            const settings = findHandler(tid, subtid);
            if (!settings) return call(self.onmsg, data, ptid, tid, subtid);
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

        function findHandler(tid, subtid) {
            const name = tid === etid ? SELF : topics.names.get(tid);
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

        // -- requests and their acknowledgements

        function request(kind, name, done) {
            issue({kind, name, done});
        }

        function issue(pending) {
            if (ended) return pending.done && setTimeout(pending.done, 0, 0);
            if (pending.kind === 0 && etid) return pending.done(0); // concerns only this client
            requests.push(pending);
            if (etid) sock.send(packet(pending.kind, pending.name));
        }

        function acked(kind, name, number) {
            const index = requests.findIndex(pending => pending.kind === kind && pending.name === name);
            if (index < 0) return; // an acknowledgement without a request
            const [pending] = requests.splice(index, 1);
            if (number) learn(kind, name, number);
            else if (kind !== SUBSCRIBE) drop(item => name === (kind === CREATE ? item.topic : item.subtopic), name);
            else if (held.some(({topic}) => topic === name)) resolve(CREATE, name);
            if (pending.done) pending.done(number);
            progress();
        }

        function drop(isRefused, name) {
            const kept = held.filter(item => !isRefused(item));
            if (kept.length < held.length) console.warn(`SMQ: the broker denied ${name}: ${held.length - kept.length} messages dropped`);
            held = kept;
            heldBytes = kept.reduce((size, {data}) => size + data.length, 0);
        }

        function learn(kind, name, number) {
            if (kind === CREATESUB) return subtopics.add(name, number);
            if (topics.add(name, number) && observers.has(name)) sock.send(packet(OBSERVE, number));
            if (kind === SUBSCRIBE && !subscriptions.has(name)) sock.send(packet(UNSUBSCRIBE, number)); // unsubscribed before the acknowledgement
        }

        function resolve(kind, name) { // requests the number of a name, once
            const known = (kind === CREATE ? topics : subtopics).numbers.has(name);
            if (!known && !requests.some(pending => pending.kind === kind && pending.name === name)) request(kind, name);
        }

        function progress() {
            let sent = 0;
            while (sent < held.length && send(held[sent])) heldBytes -= held[sent++].data.length;
            held.splice(0, sent);
            pingIfDrained();
            if (!restoring || !etid || (requests.length && requests[0].restores)) return;
            restoring = false;
            const again = connectedBefore;
            connectedBefore = true;
            if (!closing) call(again ? self.onreconnect : self.onconnect, etid, seed, address);
        }

        function send({data, topic, subtopic}) {
            const tid = topic === SELF ? etid : topics.number(topic), stid = subtopics.number(subtopic || 0);
            if (!etid || tid === undefined || stid === undefined) return false;
            sock.send(packet(PUBLISH, tid, etid, stid, data));
            unconfirmed += 1;
            return true;
        }

        // -- the methods

        self.publish = (data, topic, subtopic) => {
            data = toBytes(data);
            if (data.length > MAX_PAYLOAD_BYTES) throw new RangeError(`SMQ: a message has at most 65520 bytes, not ${data.length}`);
            const item = {data, topic, subtopic}, waitingBytes = heldBytes + (sock ? sock.bufferedAmount : 0);
            if (closing || ended || waitingBytes + data.length > MAX_WAITING_BYTES) return false; // dropped; the result reports it
            if (!held.length && send(item)) return true;
            if (held.length >= MAX_HELD_MESSAGES) return false;
            held.push(item);
            heldBytes += data.length;
            if (onWire(topic)) resolve(CREATE, topic);
            if (typeof subtopic === "string") resolve(CREATESUB, subtopic);
            return true;
        };

        self.pubjson = (value, topic, subtopic) => self.publish(JSON.stringify(value), topic, subtopic);

        self.create = (topic, subtopic, onack) => {
            if (typeof subtopic === "function") [subtopic, onack] = [undefined, subtopic];
            if (subtopic === undefined) return number(CREATE, topic, tid => call(onack, tid !== 0, topic, tid));
            number(CREATE, topic, tid => number(CREATESUB, subtopic, stid => {
                call(onack, tid !== 0 && stid !== 0, topic, tid, subtopic, stid);
            }));
        };

        self.createsub = (subtopic, onack) => number(CREATESUB, subtopic, stid => call(onack, stid !== 0, subtopic, stid));

        function number(kind, name, done) { // known numbers need no round trip
            const known = (kind === CREATE ? topics : subtopics).number(name);
            if (known === undefined) request(kind, name, done);
            else done(known);
        }

        self.subscribe = (topic, subtopic, settings) => {
            if (typeof subtopic === "object" && subtopic !== null) [subtopic, settings] = [undefined, subtopic];
            settings = settings || {};
            const key = subtopic === undefined || subtopic === null || subtopic === 0 ? null : subtopic;
            if (!subscriptions.has(topic)) subscriptions.set(topic, new Map());
            subscriptions.get(topic).set(key, settings);

            const finish = tid => {
                const stid = key === null ? 0 : subtopics.number(key);
                const extra = key === null ? [] : [key, stid || 0];
                if (!tid || stid === undefined) withdraw(topic, key);
                call(settings.onack, tid !== 0 && stid !== undefined, topic, stid === undefined ? 0 : tid, ...extra);
            };
            const local = () => finish(topic === SELF ? etid : topic);
            const newSubtopic = typeof key === "string" && subtopics.number(key) === undefined;
            if (newSubtopic) request(CREATESUB, key, onWire(topic) ? undefined : local);
            if (onWire(topic)) request(SUBSCRIBE, topic, finish);
            else if (!newSubtopic) issue({kind: 0, name: "", done: local});
        };

        function withdraw(topic, key) {
            const handlers = subscriptions.get(topic);
            if (handlers && handlers.delete(key) && !handlers.size) self.unsubscribe(topic);
        }

        self.unsubscribe = topic => {
            subscriptions.delete(topic);
            const tid = onWire(topic) ? topics.number(topic) : undefined;
            if (etid && tid !== undefined) sock.send(packet(UNSUBSCRIBE, tid));
        };

        self.observe = (topic, onchange) => {
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

        // Sends the queued messages, then ends permanently without calling onclose. The promise resolves to whether the broker has
        // received all messages.
        self.disconnect = () => {
            if (closing) return closing.promise;
            if (ended) return Promise.resolve(true); // messages that were lost at the end are in the console
            closing = {pinged: false};
            closing.promise = new Promise(resolve => { closing.resolve = resolve; });
            closing.timer = setTimeout(end, timeoutMs, "the time limit was reached");
            clearTimeout(retryTimer);
            if (!sock && held.length) open();
            pingIfDrained();
            return closing.promise;
        };

        open();
        return self;
    }

    // ---- addresses

    function wsURL(path) { // the page's host and port; a relative path starts from the page's folder
        const page = location.pathname;
        if (path === undefined || path === null) path = page;
        if (path[0] !== "/") path = page.slice(0, page.lastIndexOf("/") + 1) + path;
        return (location.protocol === "https:" ? "wss://" : "ws://") + location.host + path;
    }

    return {Client, wsURL, utf8, websocket: () => "WebSocket" in window};
})();
