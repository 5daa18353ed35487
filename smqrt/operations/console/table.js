// A table that reuses the elements of its rows, so that focus and selection stay when figures change.

import {empty, h} from "./dom.js";

const NOTHING = new Set(["0", "0 B", "–"]); // shown less prominently

/* columns: {key, label, number, named, wide, wider, sort, text(row) | cell(row) | draw(td, row), signature(row), alert(row)}
 *   number     aligned to the right
 *   wide       hidden on a phone; wider: also hidden in a small window
 *   sort       the value of `sort` in the request to the server
 *   text       returns the text of the cell
 *   cell       returns elements; called only when signature(row) has changed
 *   draw       fills the cell at each update
 *   named      has a name from a client, which needs some width
 * An element with the class "opener" in a row is also clicked by a click on the row; the arrow keys go to the next one.
 */
export class Table {
    constructor({caption, columns, key, none, onsort, sorted}) {
        this.columns = columns;
        this.key = key;
        this.rows = new Map();
        this.body = h("tbody", {click: openRow, keydown: moveFocus});
        this.heads = new Map();
        const head = h("tr", {}, columns.map(column => this.heading(column, onsort)));
        this.table = h("table", {}, h("caption", {class: "unseen"}, caption), h("thead", {}, head), this.body);
        this.none = empty(...none);
        this.none.hidden = true;
        this.element = h("div", {class: "table"}, this.table, this.none);
        if (sorted) this.sorted(sorted);
    }

    heading(column, onsort) {
        const {label, sort, number} = column;
        const content = sort && onsort ? h("button", {type: "button", class: "plain", click: () => onsort(sort)}, label) : label;
        const th = h("th", {scope: "col", class: classes(column, number ? "number" : "")}, content || h("span", {class: "unseen"}, column.name));
        if (sort) this.heads.set(sort, th);
        return th;
    }

    sorted(word) {
        for (const [sort, th] of this.heads) {
            if (sort === word) th.setAttribute("aria-sort", sort === "name" || sort === "address" || sort === "user" ? "ascending" : "descending");
            else th.removeAttribute("aria-sort");
        }
    }

    update(rows) {
        const gone = new Set(this.rows.keys());
        let before = null;
        for (const row of rows) {
            const key = String(this.key(row));
            gone.delete(key);
            const tr = this.row(key);
            this.fill(tr, row);
            const place = before ? before.nextElementSibling : this.body.firstElementChild;
            if (place !== tr) this.body.insertBefore(tr, place);
            before = tr;
        }
        for (const key of gone) {
            this.rows.get(key).remove();
            this.rows.delete(key);
        }
        this.table.hidden = !rows.length;
        this.none.hidden = Boolean(rows.length);
    }

    row(key) {
        if (!this.rows.has(key)) {
            const cells = this.columns.map(column => h("td", {class: classes(column, column.number ? "number" : "")}));
            this.rows.set(key, h("tr", {}, cells));
        }
        return this.rows.get(key);
    }

    fill(tr, row) {
        this.columns.forEach((column, index) => {
            const td = tr.cells[index];
            if (column.cell) {
                const signature = JSON.stringify(column.signature ? column.signature(row) : row);
                if (td.signature !== signature) {
                    td.signature = signature;
                    td.replaceChildren(...[column.cell(row)].flat().filter(Boolean));
                }
            } else if (column.draw) {
                column.draw(td, row);
            } else {
                const text = column.text(row);
                if (td.textContent !== text) td.textContent = text;
                if (column.number) td.classList.toggle("zero", NOTHING.has(text));
            }
            if (column.alert) td.classList.toggle("alert", column.alert(row));
        });
    }
}

function openRow(event) {
    if (event.target.closest("a, button, summary") || String(getSelection())) return; // a text is being selected
    event.target.closest("tr")?.querySelector(".opener")?.click();
}

function moveFocus(event) {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const openers = [...event.currentTarget.querySelectorAll(".opener")], at = openers.indexOf(document.activeElement);
    const next = at < 0 ? null : openers[at + (event.key === "ArrowDown" ? 1 : -1)];
    if (!next) return;
    event.preventDefault();
    next.focus();
}

const classes = (column, more) => [more, column.named && "named", column.wide && "wide", column.wider && "wider"].filter(Boolean).join(" ");
