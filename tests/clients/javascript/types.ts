// What the types of @smqrt/client allow, and below "@ts-expect-error" what they do not. It is compiled, not run.
import {Client, SmqClient, SmqError, utf8, websocket, wsURL, type Message, type SmqOptions, type State} from "@smqrt/client";

interface Reading {
    celsius: number;
}

const options: SmqOptions = {
    uid: "thermometer",
    queueMessages: 10,
    queuePolicy: "oldest",
    signal: new AbortController().signal,
    onauth: async seed => `secret ${seed.toFixed()}`,
    onconnect: undefined,
    onclose: (message, canReconnect) => (canReconnect ? message.length * 1000 : false),
};
const smq = new SmqClient(new URL("ws://localhost/smq"), options);
const state: State = smq.state;
const etid: number = await smq.ready;
smq.onconnect = (own, seed, ip) => console.log(own + seed, ip.length, state);
smq.onclose = null;

for await (const message of smq.messages<Reading>("temperature", {subtopic: "celsius", limit: 3})) {
    const celsius: number = message.json.celsius;
    const sent: boolean = message.reply({celsius});
    if (sent) break;
}
const reply: Message<Reading> = await smq.request<Reading>(etid, [1, 2], {timeout: 100});
const tid: number = await smq.subscribe("text", {datatype: "text", onmsg: (text, ptid) => console.log(text.length, ptid)});
await smq.subscribe("bytes", "sub", {onmsg: data => console.log(data.byteLength)});
await smq.subscribe<Reading>("json", {datatype: "json", onmsg: value => console.log(value.celsius)});
await smq.create("a", "b", (accepted, topic, number, subtopic, subtid) => console.log(accepted, topic, number, subtopic, subtid));
smq.publish(new DataView(new ArrayBuffer(2)), "bytes");
const stop: () => void = smq.watchState(value => console.log(value === "online"));
const old = Client(wsURL("smq.lsp"), {cleanstart: true});
const sock: {readonly bufferedAmount: number} | null = new Client({uid: "123456"}).getsock();
console.log(reply.text, tid, stop, old.gettid(), sock, websocket(), utf8.length("x"), new SmqError("closed", "x").code);

// @ts-expect-error a JSON of another type
reply.json.fahrenheit;
// @ts-expect-error an unknown option
new SmqClient("ws://localhost/smq", {queueSize: 3});
// @ts-expect-error an unknown policy
new SmqClient("ws://localhost/smq", {queuePolicy: "latest"});
// @ts-expect-error a value that is neither text nor bytes
smq.publish({celsius: 1}, "temperature");
// @ts-expect-error a topic is missing
smq.publish("x");
// @ts-expect-error a request goes to a number
await smq.request("topic", "x");
// @ts-expect-error text is no number
await smq.subscribe("text", {datatype: "text", onmsg: (value: number) => value});
// @ts-expect-error the JSON of a message without a type is unknown
for await (const message of smq.messages("x")) message.json.celsius;
// @ts-expect-error assigned by the client only
smq.state = "online";
