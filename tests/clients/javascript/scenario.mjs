// @smqrt/client in Node.js with its built-in WebSocket: prints what happens; the test compares. Argument: the address of the hub.
import {SmqClient, SmqError} from "@smqrt/client";

const print = (...values) => console.log(values.map(value => JSON.stringify(value)).join(" "));
const failure = promise => promise.then(() => "no error", error => error.code || error.name);

const first = new SmqClient(process.argv[2], {info: "first", reconnectDelay: 10});
const second = new SmqClient(process.argv[2], {info: "second"});
print(first.state, first.publish("queued", "topic"), first.backlog);
const etid = await second.ready;
print(second.state, etid === second.gettid());

(async () => {
    for await (const message of second.messages("self")) {
        if (message.text !== "silence") message.reply({sum: message.json.reduce((sum, n) => sum + n)});
    }
    print("the loop has ended");
})();
print((await first.request(etid, [2, 40])).json);
print(await failure(first.request(etid, "silence", {timeout: 20})));
print(await failure(first.request(etid, "silence", {signal: AbortSignal.timeout(20)})));

const stream = second.messages("größe/€", {subtopic: "s"});
await stream.subscribed;
first.publish(new Uint8Array(65520), "größe/€", "s");
first.publish("ü€😀", "größe/€", "s");
print((await stream.next()).value.data.length, (await stream.next()).value.text);

const states = [], online = new Promise(resolve => first.watchState(state => states.push(state) && state === "online" && resolve()));
first.pubjson({drop: true}, "control");
await online;
print(states);
first.publish("again", "größe/€", "s");
print((await stream.next()).value.text);

await second.close();
print(await stream.next(), second.state, second.closeReason);
print(await failure(second.request(etid, "x")), new SmqError("closed", "x") instanceof Error);

const refused = new SmqClient(process.argv[2].replace("smq.lsp", "none"), {reconnect: false});
print(await failure(refused.ready), refused.closeReason);
await first.close(); // nothing keeps the process now
