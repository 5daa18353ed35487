<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Clicks</title>
<link rel="icon" href="data:,">
<script src="/rtl/smq.js"></script>
<style>
  :root { color-scheme: light dark; }
  body { font: 1.1rem/1.5 system-ui, sans-serif; background: canvas; display: grid; place-content: center; min-height: 90vh; margin: 0; text-align: center; }
  output { display: block; font-size: 4rem; font-weight: 700; }
  button { font: inherit; padding: .6rem 1.6rem; border: 0; border-radius: .6rem; background: #1668a8; color: #fff; cursor: pointer; }
</style>
</head>
<body>
<main>
<h1>Clicks</h1>
<p>Open this page in two windows.</p>
<output id="clicks"><?lsp= app.clicks ?></output>
<p><button id="click">Click</button></p>
</main>
<script>
  const smq = SMQ.Client(SMQ.wsURL("smq.lsp"));
  smq.onclose = (message, canReconnect) => canReconnect ? 1000 : 0;
  smq.subscribe("clicks", {datatype: "json", onmsg: state => clicks.textContent = state.clicks});
  click.onclick = () => smq.publish("", "click");
</script>
</body>
</html>
