/* sha1(data): the SHA-1 digest of a string (as UTF-8) or an array of bytes, as 40 hexadecimal digits in lower case.
 *
 * Browsers have crypto.subtle on https and localhost only, so a login page at an http address needs this (FIPS 180-4).
 *
 * A form with a button `ba_loginbut` and the hidden fields `ba_seed` and `ba_seedkey` sends its password hashed: the
 * SHA-1 of `ba_password` and the seed in decimal. With a field `ba_realm`, and /rtl/spark-md5.min.js loaded, the HA1 of
 * user, realm and password replaces the password, for user databases that store it. The field itself does not change,
 * only the form data.
 */
"use strict";

window.sha1 = (() => {
    const rotate = (word, bits) => word << bits | word >>> 32 - bits;

    // The function of three words, and the constant, of each twenty rounds.
    const STAGES = [
        [(b, c, d) => b & c | ~b & d, 0x5A827999],
        [(b, c, d) => b ^ c ^ d, 0x6ED9EBA1],
        [(b, c, d) => b & c | b & d | c & d, 0x8F1BBCDC],
        [(b, c, d) => b ^ c ^ d, 0xCA62C1D6],
    ];

    function pad(message) { // a one bit, zeros, and the length in bits at the end of the last 64-byte block
        const padded = new Uint8Array((message.length + 8 >> 6) + 1 << 6);
        padded.set(message);
        padded[message.length] = 0x80;
        const view = new DataView(padded.buffer);
        view.setUint32(padded.length - 8, Math.floor(message.length / 0x20000000));
        view.setUint32(padded.length - 4, message.length << 3);
        return view;
    }

    function schedule(view, start) {
        const words = new Int32Array(80);
        for (let i = 0; i < 16; i++) words[i] = view.getInt32(start + 4 * i);
        for (let i = 16; i < 80; i++) words[i] = rotate(words[i - 3] ^ words[i - 8] ^ words[i - 14] ^ words[i - 16], 1);
        return words;
    }

    function compress(state, words) {
        let [a, b, c, d, e] = state;
        words.forEach((word, round) => {
            const [mix, constant] = STAGES[Math.floor(round / 20)];
            const next = rotate(a, 5) + mix(b, c, d) + e + constant + word | 0;
            [a, b, c, d, e] = [next, a, rotate(b, 30), c, d];
        });
        return [a, b, c, d, e].map((value, index) => value + state[index] | 0);
    }

    return data => {
        const view = pad(typeof data === "string" ? new TextEncoder().encode(data) : Uint8Array.from(data));
        let state = [0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0];
        for (let start = 0; start < view.byteLength; start += 64) state = compress(state, schedule(view, start));
        return state.map(word => (word >>> 0).toString(16).padStart(8, "0")).join("");
    };
})();

(() => {
    const PASSWORD = "ba_password";

    function hashed(value) { // `value` returns the value of a field of the form
        const realm = value("ba_realm"), password = value(PASSWORD);
        const isHa1 = realm && window.SparkMD5;
        return sha1((isHa1 ? SparkMD5.hash(`${value("ba_username")}:${realm}:${password}`) : password) + value("ba_seed"));
    }

    function hook(button) {
        const form = button.form || button.closest("form");
        if (!form) return;
        const value = name => (form.elements[name] || document.getElementById(name) || {}).value || "";
        form.addEventListener("formdata", event => {
            if (value("ba_seed") && value(PASSWORD)) event.formData.set(PASSWORD, hashed(value));
        });
        if (button.type !== "submit") button.addEventListener("click", event => event.defaultPrevented || form.requestSubmit());
    }

    function hookAll() {
        const button = document.getElementById("ba_loginbut") || document.getElementsByName("ba_loginbut")[0];
        if (button) hook(button);
    }

    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", hookAll);
    else hookAll();
})();
