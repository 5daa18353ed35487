// The commands of a driver of the JavaScript client for the client cases; node.mjs and browser.py run it.

const encoder = new TextEncoder(), decoder = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true});

function payloadOf({text, base64, repeat}) { // of a command
    if (base64 !== undefined) return Uint8Array.from(atob(base64), char => char.charCodeAt(0));
    return encoder.encode(repeat ? repeat.text.repeat(repeat.times) : text);
}

function shown(data) { // as text, or as base64 when it is not UTF-8
    try {
        return {text: decoder.decode(data)};
    } catch {
        return {base64: btoa(String.fromCharCode(...data))};
    }
}

const topicOf = ({etid, topic}) => etid === undefined ? topic : etid;

class CaseClient {
    constructor(name, emit, module) {
        Object.assign(this, {name, module, prefix: null, streams: new Map(), mayRun: Promise.resolve()});
        this.event = (event, fields) => emit({client: name, event, ...fields});
    }

    connect({url, uid, info, password, options}) {
        const given = {timeout: 10000, reconnectDelay: 50, reconnectDelayMax: 50, ...options, uid, info};
        const smq = this.smq = new this.module.SmqClient(url, given);
        if (password !== undefined) smq.onauth = () => password;
        smq.onconnect = etid => this.event("connected", {etid});
        smq.onreconnect = etid => this.event("reconnected", {etid});
        smq.onclose = reason => { this.event("disconnected", {reason}); }; // no decision: as the option reconnect says
        smq.onmsg = (data, etid, tid, subtid) => {
            const topic = tid === smq.gettid() ? "self" : smq.tid2topic(tid), subtopic = smq.tid2subtopic(subtid);
            setTimeout(() => this.receive({data, etid, subtid, topic, subtopic})); // behind the loops, which have earlier messages
        };
        smq.waitClosed().then(reason => this.event("closed", {reason}));
    }

    receive({data, etid, subtid, topic, subtopic}) {
        if (topic === "self" && subtid && this.prefix) return this.smq.publish([...this.prefix, ...data], etid, subtid);
        this.event("message", {topic, subtopic: subtopic === undefined ? null : subtopic, from: etid, ...shown(data)});
    }

    subscribe({topic, subtopic}) {
        const key = JSON.stringify([topic, subtopic]), former = this.streams.get(key);
        const stream = this.smq.messages(topic, {subtopic});
        this.streams.set(key, stream);
        if (former) former.return();
        stream.subscribed.then(accepted => this.event("subscribed", {topic, accepted}));
        this.read(stream).catch(error => error.code === "denied" || this.event("error", {text: String(error)}));
    }

    async read(stream) {
        for await (const message of stream) {
            await this.mayRun;
            const isOfAnother = stream.subtopic === undefined && this.streams.has(JSON.stringify([stream.topic, message.subtopic]));
            if (!isOfAnother || message.subtopic === undefined) this.receive(message);
        }
    }

    unsubscribe({topic}) {
        this.smq.unsubscribe(topic);
    }

    async create({topic}) {
        this.event("created", {topic, tid: await this.smq.create(topic)});
    }

    async createsub({subtopic}) {
        this.event("created", {subtopic, stid: await this.smq.createsub(subtopic)});
    }

    publish(command) {
        if (!this.smq.publish(payloadOf(command), topicOf(command), command.subtopic)) throw new Error("the message was dropped");
    }

    observe(command) {
        const topic = topicOf(command), field = typeof topic === "number" ? "etid" : "topic";
        this.smq.observe(topic, subscribers => this.event("change", {[field]: topic, subscribers}));
    }

    unobserve(command) {
        this.smq.unobserve(topicOf(command));
    }

    async request(command) {
        const options = {timeout: command.timeout_ms};
        return shown((await this.smq.request(command.etid, payloadOf(command), options)).data);
    }

    answer({prefix}) {
        this.prefix = encoder.encode(prefix);
    }

    pause() {
        this.mayRun = new Promise(resolve => { this.resume = resolve; });
    }

    disconnect() {
        this.smq.disconnect();
    }

    async close() {
        if (this.resume) this.resume();
        await this.smq.close().catch(() => {});
    }

    state() {
        return {connected: this.smq.state === "online", etid: this.smq.gettid() || null};
    }
}

/** Returns a function that runs a command. `emit` gets its answer and the events; `module` is that of the client. */
export function makeDriver(module, emit) {
    const clients = new Map();
    return async command => {
        if (!clients.has(command.client)) clients.set(command.client, new CaseClient(command.client, emit, module));
        try {
            emit({id: command.id, ok: true, ...await clients.get(command.client)[command.do](command)});
        } catch (error) {
            emit({id: command.id, error: `${error.name}: ${error.message}`});
        }
    };
}
