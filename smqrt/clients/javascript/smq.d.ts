/** SMQ client: publish, subscribe and request over a WebSocket. Times are milliseconds. */

/** A topic: a name, or a number (tid, etid). "self" is the client's own etid. */
export type Topic = string | number;
export type Subtopic = string | number;
/** Text is sent as UTF-8; buffers and their views, such as Uint8Array and DataView, as the bytes they have; numbers as bytes. */
export type Payload = string | ArrayBuffer | ArrayBufferView | readonly number[];
export type State = "connecting" | "online" | "offline";

export type SmqErrorCode = "aborted" | "closed" | "denied" | "full" | "lost" | "timeout" | "undelivered";

export class SmqError extends Error {
    constructor(code: SmqErrorCode, message: string);
    readonly code: SmqErrorCode;
}

/** A received message, with `T` as the type of its JSON. */
export interface Message<T = unknown> {
    readonly data: Uint8Array;
    /** The data as UTF-8; throws a TypeError if it is something else. */
    readonly text: string;
    /** The data as JSON; throws a SyntaxError if it is something else. The type is not checked. */
    readonly json: T;
    /** The publisher. */
    readonly etid: number;
    readonly tid: number;
    readonly subtid: number;
    readonly topic: Topic;
    /** Its name, if this client knows it. */
    readonly subtopic: string | undefined;
    /**
     * Sends a message to the publisher, with the sub-topic of this message. Text and bytes are sent as they are, other values, also
     * arrays, as JSON. Returns false if it was dropped.
     */
    reply(data: unknown): boolean;
}

/** The messages of a topic. A loop over it that ends also ends the subscription. */
export interface Messages<T = unknown> extends AsyncIterableIterator<Message<T>> {
    readonly topic: Topic;
    readonly subtopic: Subtopic | undefined;
    /** Messages that were dropped, because more than `limit` waited for the loop. */
    readonly dropped: number;
    /** Resolves to true when the broker has accepted the subscription, and to false when there will be none. */
    readonly subscribed: Promise<boolean>;
    return(value?: unknown): Promise<IteratorResult<Message<T>, undefined>>;
    [Symbol.asyncIterator](): Messages<T>;
}

export interface WaitOptions {
    /** By default there is no time limit; for `request` it is the option `timeout` of the client. */
    timeout?: number | undefined;
    /** Ends the waiting; the promise rejects with its reason. */
    signal?: AbortSignal | undefined;
}

export interface MessagesOptions {
    /** Only messages with this sub-topic. */
    subtopic?: Subtopic | undefined;
    /** How many messages may wait for the loop (1000, and 16 MiB); then the oldest are dropped. */
    limit?: number | undefined;
    /** Ends the loop, with its reason as an error. */
    signal?: AbortSignal | undefined;
}

export type OnMessage<V> = (data: V, ptid: number, tid: number, subtid: number) => void;

interface SubscriptionOf<V> {
    /** By default the client's `onmsg`. */
    onmsg?: OnMessage<V> | undefined;
    onack?: ((accepted: boolean, topic: Topic, tid: number, subtopic?: Subtopic, subtid?: number) => void) | undefined;
}
export interface BytesSubscription extends SubscriptionOf<Uint8Array> {
    datatype?: undefined;
}
export interface TextSubscription extends SubscriptionOf<string> {
    datatype: "text";
}
export interface JsonSubscription<T> extends SubscriptionOf<T> {
    datatype: "json";
}

export type Credentials = Payload;

/** Functions that may be given as options, or assigned later. */
export interface Callbacks {
    /** Returns the credentials of a new connection; one that throws ends the client. `seed` is a number of the broker, `ip` the own address as it sees it. */
    onauth: ((seed: number, ip: string) => Credentials | null | undefined | Promise<Credentials | null | undefined>) | null;
    onconnect: ((etid: number, seed: number, ip: string) => void) | null;
    onreconnect: ((etid: number, seed: number, ip: string) => void) | null;
    /** Decides about the next attempt: after so many ms; never for false or 0; otherwise as the option `reconnect` says. */
    onclose: ((message: string, canReconnect: boolean) => number | boolean | void | null) | null;
    /** Gets the messages that no handler and no loop takes. */
    onmsg: OnMessage<Uint8Array> | null;
    onstate: ((state: State) => void) | null;
}

export type CallbackOptions = {[Name in keyof Callbacks]?: Callbacks[Name] | undefined};

export interface SmqOptions extends CallbackOptions {
    /** Of this client, 6 to 255 bytes. A new connection with the same uid takes over. Default: chosen for each client. */
    uid?: string | undefined;
    /** A text for the broker's application. */
    info?: string | undefined;
    /** Until the broker accepts a connection, for a reply, and for `disconnect` (10000). */
    timeout?: number | undefined;
    /** Whether to reconnect by itself (true; false for `Client`). */
    reconnect?: boolean | undefined;
    /** Before the first reconnect (1000). It doubles with every failure, less a random part of up to a half. */
    reconnectDelay?: number | undefined;
    /** The longest delay (30000). */
    reconnectDelayMax?: number | undefined;
    /** Silence of the broker after which it is pinged (120000; 0 for `Client`: never). */
    ping?: number | undefined;
    /** Until the response; then the connection counts as lost (10000). */
    pong?: number | undefined;
    /** Whether to forget subscriptions, names and queued messages when the connection is lost (false). */
    cleanstart?: boolean | undefined;
    /** Messages that the queue holds (10000). */
    queueMessages?: number | undefined;
    /** Bytes that the queue and the WebSocket hold (16 MiB). */
    queueBytes?: number | undefined;
    /** What a full queue drops: the newest message, for which `publish` returns false, or the oldest. */
    queuePolicy?: "newest" | "oldest" | undefined;
    /** Ends the client at once, without sending what is queued. */
    signal?: AbortSignal | undefined;
    /** A class in place of the global WebSocket. */
    WebSocket?: (new (url: string) => any) | undefined;
}

export interface SocketInfo {
    readonly url: string;
    readonly readyState: number;
    readonly bufferedAmount: number;
    close(): void;
}

export interface SmqClient extends Callbacks {}
export class SmqClient {
    /** Without a URL: the page's own address. A path is on the page's host; http: and https: become ws: and wss:. */
    constructor(url?: string | URL, options?: SmqOptions);
    constructor(options: SmqOptions);

    /** "online" when the broker has accepted the connection and all subscriptions are restored. */
    readonly state: State;
    /** Resolves to the etid when the state is "online"; rejects when the client has ended. */
    readonly ready: Promise<number>;
    /** Whether the client has ended for good. */
    readonly closed: boolean;
    /** Why; empty before. */
    readonly closeReason: string;
    /** Messages in the queue. */
    readonly backlog: number;
    /** Bytes in the queue and in the WebSocket. */
    readonly backlogBytes: number;
    /** Messages that were not sent: queue full, topic denied, connection lost with cleanstart, client ended. */
    readonly dropped: number;

    /** As `ready`, with a time limit or a signal. */
    waitConnected(options?: WaitOptions): Promise<number>;
    /** Resolves to the close reason. */
    waitClosed(options?: WaitOptions): Promise<string>;
    /** Calls `listener` at each change of `state`; returns a function that ends this. */
    watchState(listener: (state: State) => void): () => void;

    /** Sends or queues a message of at most 65520 bytes; returns false if it was dropped. */
    publish(data: Payload, topic: Topic, subtopic?: Subtopic): boolean;
    pubjson(value: unknown, topic: Topic, subtopic?: Subtopic): boolean;
    /**
     * Sends data to the client `etid` (1: the server); resolves to its reply. Text and bytes are sent as they are, other values, also
     * arrays, as JSON.
     */
    request<T = unknown>(etid: number, data: unknown, options?: WaitOptions): Promise<Message<T>>;

    /** Subscribes; for `for await`. */
    messages<T = unknown>(topic: Topic, options?: MessagesOptions): Messages<T>;
    /** Subscribes with a handler. Resolves to the number of the topic; to 0 if it is denied, or the client ends. */
    subscribe(topic: Topic, settings: TextSubscription): Promise<number>;
    subscribe<T = unknown>(topic: Topic, settings: JsonSubscription<T>): Promise<number>;
    subscribe(topic: Topic, settings?: BytesSubscription): Promise<number>;
    subscribe(topic: Topic, subtopic: Subtopic | null | undefined, settings: TextSubscription): Promise<number>;
    subscribe<T = unknown>(topic: Topic, subtopic: Subtopic | null | undefined, settings: JsonSubscription<T>): Promise<number>;
    subscribe(topic: Topic, subtopic?: Subtopic | null, settings?: BytesSubscription): Promise<number>;
    /** Ends the subscription with all its handlers and loops. */
    unsubscribe(topic: Topic): void;

    /** Requests the number of a name. Resolves to it; to 0 if it is denied, or the client ends. */
    create(topic: Topic, onack?: (accepted: boolean, topic: Topic, tid: number) => void): Promise<number>;
    create(
        topic: Topic,
        subtopic: Subtopic,
        onack?: (accepted: boolean, topic: Topic, tid: number, subtopic: Subtopic, subtid: number) => void,
    ): Promise<number>;
    createsub(subtopic: Subtopic, onack?: (accepted: boolean, subtopic: Subtopic, subtid: number) => void): Promise<number>;

    /** Calls `onchange` with the number of subscribers at each change; for an etid once, with 0, when it disconnects. */
    observe(topic: Topic, onchange: (subscribers: number, topic: Topic) => void): void;
    unobserve(topic: Topic): void;

    /** The client's own etid while it is connected. */
    gettid(): number | undefined;
    topic2tid(topic: string): number | undefined;
    tid2topic(tid: number): string | undefined;
    subtopic2tid(subtopic: string): number | undefined;
    tid2subtopic(subtid: number): string | undefined;
    getsock(): SocketInfo | null;

    /** Sends what is queued within `timeout`, then ends. Resolves to whether the broker has received all messages. */
    disconnect(): Promise<boolean>;
    /** The same; rejects with the code "undelivered" if the broker has not received all messages. */
    close(): Promise<void>;
}

/** A client that reconnects only if `onclose` returns a number of ms, and sends no pings; with or without `new`. */
export const Client: {
    (url?: string | URL, options?: SmqOptions): SmqClient;
    (options: SmqOptions): SmqClient;
    new (url?: string | URL, options?: SmqOptions): SmqClient;
    new (options: SmqOptions): SmqClient;
};

/** The ws: or wss: address of a path on the page's own host; a relative path starts from the page's folder. */
export function wsURL(path?: string): string;
/** Whether there are WebSockets here. */
export function websocket(): boolean;
export const utf8: {
    length(text: string): number;
    encode(text: string): Uint8Array;
    /** Throws a TypeError for bytes that are not UTF-8. */
    decode(bytes: Uint8Array): string;
};

/** The global of the classic script /rtl/smq.js. */
export as namespace SMQ;
