<!doctype html>
<html lang="en">
<head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>Door</title>
    <link rel="icon" href="data:,">
    <link rel="stylesheet" href="/rtl/page.css">
    <link rel="stylesheet" href="style.css">
    <script src="/rtl/smq.js" defer></script>
    <script src="/rtl/sha1.js" defer></script>
    <script src="auth.js" defer></script>
</head>
<body>
    <header>
        <div><a class="back" href="/">Applications</a><h1>Door</h1></div>
        <output id="state" class="state">not signed in</output>
    </header>
    <main>
        <form id="login" class="card">
            <div><label for="user">Name</label><input id="user" required autocomplete="username" autocapitalize="none" autofocus></div>
            <div><label for="password">Password</label><input id="password" type="password" required autocomplete="current-password"></div>
            <p id="refusal" role="alert"></p>
            <button>Sign in</button>
            <small class="soft">There are two users: <code>keeper</code> with password <code>sesame</code>, and <code>guest</code> with <code>welcome</code>, who cannot move the door.</small>
            <?lsp if not request:issecure() then ?>
            <small class="soft">This page was sent over plain HTTP: the password is hashed, but all other data can be read by third parties.</small>
            <?lsp end ?>
        </form>
        <section id="panel" class="card" hidden>
            <p>Signed in as <strong id="who"></strong>.</p>
            <output id="door" aria-live="polite">…</output>
            <p id="by" class="soft"></p>
            <div class="row">
                <button id="move" aria-describedby="why" disabled>Open</button>
                <button id="leave" class="quiet">Sign out</button>
            </div>
            <p id="why" class="soft"></p>
        </section>
    </main>
</body>
</html>
