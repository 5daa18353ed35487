// Driver of the JavaScript client in Node.js for the client cases: commands on standard input, answers and events on standard output.
import {createInterface} from "node:readline";
import * as module from "../../../smqrt/clients/javascript/smq.mjs";
import {makeDriver} from "./commands.mjs";

const run = makeDriver(module, answer => process.stdout.write(JSON.stringify(answer) + "\n"));
for await (const line of createInterface({input: process.stdin})) run(JSON.parse(line));
process.exit();
