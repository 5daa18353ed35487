// Messages: publish to a topic or a client, and show the messages of topics.

import {post, toast} from "../api.js";
import {empty, foreign, h, section, setText} from "../dom.js";
import * as format from "../format.js";
import {foreignName, HubChoice} from "./parts.js";

const SHOWN = 200;

export function messages({live, place, ready, parameters}) {
    const topic = parameters.get("topic") ?? Number(parameters.get("tid")), options = {hub: parameters.get("hub") ?? "", topics: topic ? [topic] : []};
    const watch = () => live.watch("messages", {hub: options.hub, topics: options.topics}, update);
    const publishing = publisher(() => options.hub), listening = listener(options, watch);
    const hub = new HubChoice(value => {
        options.hub = value;
        listening.clear();
        watch();
    });
    const tools = h("div", {class: "section tools"}, hub.element);
    const parts = [tools, h("div", {class: "two"}, publishing, listening.element)];
    if (parameters.get("topic")) publishing.querySelector("[name=topic]").value = parameters.get("topic");
    function update(data, error) {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        if (!data) return listening.refused(error);
        if (data.hub !== undefined) options.hub = String(data.hub);
        hub.update(data.hubs, data.hub);
        tools.hidden = data.hubs.length < 2;
        listening.show(data);
    }
    watch();
}

function publisher(hub) {
    const fault = h("p", {class: "fault", role: "alert"});
    const topic = h("input", {name: "topic", required: true, autocomplete: "off", spellcheck: "false"});
    const subtopic = h("input", {name: "subtopic", autocomplete: "off", spellcheck: "false", placeholder: "none"});
    const body = h("textarea", {name: "payload", spellcheck: "false"});
    const button = h("button", {class: "main"}, "Publish");
    const choice = (name, options) => h("fieldset", {class: "choices"}, h("legend", {class: "unseen"}, name[0]),
        options.map(([value, label], index) => h("label", {}, h("input", {type: "radio", name: name[1], value, checked: !index, change: changed}), label)));
    const target = h("span", {}, "Topic");
    const form = h("form", {class: "inside fields", submit: publish},
        h("div", {class: "all"}, choice(["Send to", "to"], [["topic", "A topic"], ["etid", "One client"]])),
        h("label", {}, target, topic), h("label", {}, "Sub-topic", subtopic),
        h("div", {class: "all"}, choice(["Payload is", "format"], [["text", "Text"], ["json", "JSON"]])),
        h("label", {class: "all"}, "Payload", body), h("div", {class: "all"}, button, " ", fault));
    function changed() {
        const isClient = form.elements.to.value === "etid";
        setText(target, isClient ? "ETID of the client" : "Topic");
        topic.inputMode = isClient ? "numeric" : "";
    }
    async function publish(event) {
        event.preventDefault();
        const isClient = form.elements.to.value === "etid";
        fault.textContent = check(isClient && topic.value, form.elements.format.value, body.value);
        if (fault.textContent) return;
        button.disabled = true;
        fault.textContent = await post(`/api/v1/hubs/${hub()}/publish`, {
            topic: isClient ? Number(topic.value) : topic.value, subtopic: subtopic.value, data: body.value,
        });
        button.disabled = false;
        if (!fault.textContent) toast("Published.");
    }
    const element = section("Publish");
    element.append(form);
    return element;
}

function check(etid, kind, payload) {
    if (etid !== false && !/^[0-9]{1,10}$/.test(etid)) return "An ETID is a number; the view Peers shows it for each client.";
    if (kind !== "json") return "";
    try {
        JSON.parse(payload);
        return "";
    } catch (error) {
        return `The payload is not JSON: ${error.message}.`;
    }
}

function listener(options, watch) {
    const input = h("input", {required: true, autocomplete: "off", spellcheck: "false"});
    const fault = h("p", {class: "fault", role: "alert"});
    const chips = h("ul", {class: "chips", "aria-label": "Subscribed topics"});
    const list = h("ol", {class: "entries"});
    const log = h("div", {class: "messages", role: "log", "aria-label": "Messages", "aria-live": "off", tabindex: "0"}, list);
    const none = empty("No messages yet", "Enter a topic above; its messages from then on are shown here.");
    const missed = h("p", {class: "small soft", role: "status"});
    const form = h("form", {class: "inside fields", submit: event => {
        event.preventDefault();
        if (!options.topics.includes(input.value)) options.topics = [...options.topics, input.value];
        input.value = "";
        changed();
    }}, h("div", {class: "all subscribing"}, h("label", {}, "Topic", input), h("button", {}, "Subscribe")), h("div", {class: "all"}, chips, fault, missed));
    const element = section("Subscribe", {}, h("button", {type: "button", class: "plain soft small", click: () => clear()}, "Clear"));
    element.append(form, log, none);
    let newest = 0, dropped = 0;

    function changed() {
        fault.textContent = "";
        chips.replaceChildren(...options.topics.map(name => h("li", {}, foreign(shown(name), {title: shown(name)}), h("button", {
            type: "button", "aria-label": `Unsubscribe from ${shown(name)}`, click: () => {
                options.topics = options.topics.filter(topic => topic !== name);
                changed();
                input.focus();
            },
        }, "×"))));
        watch();
    }
    function clear() {
        list.replaceChildren();
        dropped = 0;
        setText(missed, "");
        none.hidden = false;
    }
    function show({messages: arrived, missed: lost}) {
        for (const message of arrived ?? []) {
            if (message.number <= newest) continue;
            newest = message.number;
            list.prepend(entry(message));
        }
        while (list.childElementCount > SHOWN) list.lastElementChild.remove();
        none.hidden = Boolean(list.childElementCount);
        dropped += lost ?? 0;
        if (dropped) setText(missed, `${format.count(dropped)} more messages are not shown.`);
    }
    chips.replaceChildren();
    if (options.topics.length) queueMicrotask(changed);
    return {element, show, clear, refused: error => { fault.textContent = error; }};
}

const shown = topic => typeof topic === "number" ? `number ${topic}` : topic;

export const entry = ({at_s: at, topic, subtopic, from, size_bytes: size, text, cut}, source = `from ${from} · `) => h("li", {},
    h("time", {}, format.time(at)),
    h("span", {}, foreignName(topic), subtopic && h("span", {class: "from"}, foreignName(subtopic)), h("span", {class: "from"}, `${source}${format.bytes(size)}`)),
    h("pre", {}, foreign(text), cut && h("span", {class: "soft"}, " …")));
