# ruff: noqa: E501 (one call a line)
"""Calls of the Lua API with good arguments, one a line: `name | arguments` or `kind:method | arguments`.

What makes the object of a kind says MAKERS, in Lua; `request` is that of the page in which the calls are made.
"""

MAKERS = """
io = ba.openio"home"
file = ba.openio"home":open("a.txt", "r")
dir = ba.create.dir("d")
resrdr = ba.create.resrdr("r", 0, ba.openio"home")
tracelogger = ba.create.tracelogger("t")
dav = ba.create.dav("dav", 0, ba.openio"home", "locks")
lockmgr = ba.create.dav("dav", 0, ba.openio"home", "locks"):lockmgr()
wfs = require"wfs" and ba.create.wfs("wfs", 0, ba.openio"home")
request = request
response = request
cookie = request:createcookie"c"
session = request:session(true)
filter = request:setresponse()
deferred = request:deferred()
sock = ba.socket.connect("127.0.0.1", listening)
udp = ba.socket.udpcon(0)
timer = ba.timer(print)
thread = ba.thread.create()
symmetric = ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12))
jsonparser = ba.json.parser()
xparser = require"xparser".create()
datetime = ba.datetime"2024-01-01T00:00:00Z"
luasqlenv = luasql.sqlite()
luasqlconn = luasql.sqlite():connect("a.db")
luasqlstmt = luasql.sqlite():connect("a.db"):prepare("SELECT ?")
luasqlcur = luasql.sqlite():connect("a.db"):execute("SELECT 1")
httpc = require"httpc".create()
http = require"http".create()
httpm = require"httpm".create()
smq = require"smq.hub".create()
smqclient = require"smq.client".create("http://127.0.0.1:1/")
mqttc = require"mqttc".create("127.0.0.1", ignore, {port = 1})
mqtt3c = require"mqtt3c".create("127.0.0.1", ignore, {port = 1})
mqttbroker = require"mqttbroker".create(0)
mqttlocal = require"mqttbroker".create(0):createClient(ignore)
mtl = with_channel()
channel = links:open(unique(), print, print)
conn = require"smq.conn".create(links)
cluster = require"smq.cluster".create(require"smq.hub".create(), links, {name = unique()})
authuser = ba.create.authuser(print)
jsonuser = ba.create.jsonuser()
authorizer = ba.create.authorizer(print)
acl = ba.create.jsonuser():authorizer()
authenticator = ba.create.authenticator(ba.create.jsonuser())
sharkssl = ba.create.sharkssl()
certstore = ba.create.certstore()
servcon = ba.create.servcon(0)
mail = require"socket.mail"{server = "127.0.0.1", port = 1}
pty = ba.forkpty("sleep", "9")
tcp = require"socket".tcp()
sudp = require"socket".udp()
emitter = require"EventEmitter".create()
JSONS = require"JSONS".create(ba.socket.connect("127.0.0.1", listening))
luaio = ba.create.luaio{}
"""
"""What makes an object of each kind."""

CALLS = """
trace | "text", 5
tracep | false, 5, "text"
ba.parselsp | "5"
ba.create.dir | "5", 5
ba.create.resrdr | "5", 5, ba.openio"home"
ba.create.tracelogger | "5", 5
ba.create.dav | "5", 5, ba.openio"home", "5", 5, 5
ba.create.wfs | "5", 5, ba.openio"home", "5", 5, 5
ba.create.upload | ba.openio"home", 5
ba.create.luaio | {open = print}
ba.create.authuser | print
ba.create.jsonuser |
ba.create.authorizer | print
ba.create.authenticator | ba.create.jsonuser(), {type = "basic", realm = "5"}
ba.session | 5
ba.sessions | "5"
ba.users |
ba.openio | "5"
ba.io |
ba.mkio | ba.openio"home", "5"
ba.loadfile | "5"
ba.timer | print
ba.thread.run | print
ba.thread.configure | 3
ba.sleep | 5
ba.exec | "5"
ba.forkpty | "5"
ba.json.encode | {5, "5"}
ba.json.decode | "5"
ba.json.encodestr | "5"
ba.json.parser | true
ba.b64encode | "5"
ba.b64decode | "55"
ba.b64urlencode | "5"
ba.urlencode | "5"
ba.urldecode | "5"
ba.rnd | 5, 5
ba.rnds | 5
ba.rndbs | 5
ba.rndseed | 5
ba.crypto.hash | "hmac", "sha256", "5"
ba.parsedate | "5"
ba.encdate | 5
ba.mime | "5"
ba.deflate | "5"
ba.cmpaddr | "5", "5"
ba.seterrh | nil
ba.aeskey | 16
ba.aesencode | "5555555555555555", "5"
ba.aesdecode | "5555555555555555", "5"
ba.crypto.symmetric | "GCM", "5555555555555555", "555555555555", "encrypt"
ba.crypto.PBKDF2 | "sha256", "5", "5", 5, 5
ba.crypto.sign | "5", key
ba.crypto.verify | "5", "5", public, {hash = "sha256", padding = "pkcs1"}
ba.crypto.sigparams | "5"
ba.crypto.keyparams | key
ba.crypto.keysize | key
ba.crypto.encrypt | "5", public, {padding = "oaep", hash = "sha256"}
ba.crypto.decrypt | "5", key
ba.datetime | 5, 5, 5
ba.datetime | "NOW", 5
ba.datetime | {year = 2000, month = 5, day = 5, hour = 5, min = 5, sec = 5, nsec = 5, offset = 5}
ba.bytearray.create | 5
ba.bytearray.tostring | ba.bytearray.create(9), 1, 5
ba.bytearray.size | ba.bytearray.create(9)
ba.bytearray.setsize | ba.bytearray.create(9), 1, 5
ba.bytearray.copy | ba.bytearray.create(9), 1, "55555", 1, 5
ba.bytearray.h2n | ba.bytearray.create(9), 1, 5, 5
ba.bytearray.n2h | ba.bytearray.create(9), 1, 5
ba.tpm.uniquekey | "5", 5
ba.tpm.globalkey | "5", 5
ba.tpm.haskey | "5"
ba.tpm.createkey | "5", {key = "ecc", curve = "SECP256R1", bits = 2048}
ba.tpm.createcsr | "5", {commonname = "5"}
ba.tpm.sign | "5", "6"
ba.tpm.jwtsign | "5", {exp = 5}, {alg = "ES256", kid = "5"}
ba.tpm.keyparams | "5"
ba.tpm.sharkcert | "5", "6"
ba.tpm.jsonuser | "5"
ba.pipe.mkfifo | "5", 5
ba.pipe.open | "5", "r"
ba.socket.h2n | 5, 5
ba.socket.n2h | 5, "5555555", 2
ba.socket.fh2n | 4, 5
ba.socket.fn2h | 4, "555555", 2
ba.socket.connect | "127.0.0.1", listening, {timeout = 500, intf = "127.0.0.1"}
ba.socket.bind | 0, {intf = "127.0.0.1"}
ba.socket.udpcon | "127.0.0.1", 5, {port = 0, intf = "127.0.0.1"}
ba.socket.udpcon | 0
ba.socket.event | print
ba.socket.getsock |
ba.socket.toip | "127.0.0.1"
ba.socket.stat |
ba.socket.http2sock | require"httpc".create()
ba.socket.sock2req | ba.socket.connect("127.0.0.1", listening), "5"
ba.parsecert | "5"
ba.create.sharkcert | ba.openio"home", "5", "5", "5"
ba.create.sharkcert | "5", "5", "5"
ba.create.sharkssl | nil, {server = true}
ba.create.servcon | 0, {intf = "127.0.0.1"}
ba.create.key | {key = "ecc", curve = "SECP256R1", bits = 2048}
ba.create.csr | key, {commonname = "5"}, {"5"}, "5"
ba.create.certificate | csr, key, 5, 500, 5
mako.dos2unix | "5"
mako.createloader | ba.openio"home"
mako.createapp | "5", 5, "nothing"
mako.startapp | "nothing"
mako.stopapp | "nothing"
mako.reloadapp | "nothing"
mako.removeapp | "nothing"
mako.exit | 5
mako.onexit | print, false
luasql.quotestr | "5"
socket.tcp |
socket.sleep | 0.001
socket.gettime |
socket.skip | 1, 5, 6
socket.dns.toip | "127.0.0.1"
socket.dns.tohostname | "127.0.0.1"
socket.dns.getaddrinfo | "127.0.0.1"
socket.connect | "127.0.0.1", listening
socket.bind | "127.0.0.1", 0, 5
socket.select | {}, {}, 0.001
socket.mail | {server = "5", port = 5, user = "5", password = "5", timeout = 500}
mime.b64 | "5", "5"
mime.unb64 | "5", "5"
mime.qp | "5", "5", "5"
mime.unqp | "5", "5"
mime.wrp | 5, "5", 5
mime.qpwrp | 5, "5", 5
mime.eol | 5, "5", "5"
mime.dot | 5, "5"
mime.wrap | "text", 5
mime.normalize | "5"
ltn12.source.string | "5"
cbor.encode | 5
cbor.decode | "5", 1
cbor.pdecode | "5", 1
jwt.sign | {exp = 5}, "5", {alg = "HS256", kid = "5", typ = "5"}
jwt.verify | "5", "5"
sqlutil.exist | "5"
sqlutil.open | "5"
sqlutil.select | luasql.sqlite():connect("a.db"), "5", print
sqlutil.find | luasql.sqlite():connect("a.db"), "5"
sqlutil.findt | luasql.sqlite():connect("a.db"), "5", {}
sqlutil.iter | luasql.sqlite():connect("a.db"), "5"
rwfile.file | ba.openio"home", "5", "5"
rwfile.file | ba.openio"home", "5"
rwfile.json | ba.openio"home", "5", {5}
serpent.line | {5, "5"}, {maxlevel = 5, maxnum = 5, indent = "5", name = "a", numformat = "%d"}
serpent.load | "5"
xml2table | "<a>5</a>"
sparkplug.encode | {timestamp = 5, seq = 5, metrics = {{name = "5", datatype = "Int32", value = 5, timestamp = 5, alias = 5}}}
sparkplug.decode | "5"
httpcm.create | {proxy = "5", proxyport = 5, proxyuser = "5", proxypass = "5", intf = "5", host = "5", maxsize = 5}
httpcm.parsequery | "5"
mqttcm.create | "127.0.0.1", print, ignore, {port = 5, timeout = 5, keepalive = 5, queuesize = 5, queuebytes = 5, maxpacketsize = 500, inflight = 5, topicalias = true, clientidentifier = "5", username = "5", password = "5", intf = "5", alpn = "5"}
mqttcm.create | "127.0.0.1", print, ignore, {port = 5, will = {topic = "5", payload = "5", qos = 1}}, {sessionexpiryinterval = 5}
mqtt3cm.create | "127.0.0.1", print, ignore, {port = 5, keepalive = 5, id = "5", uname = "5", passwd = "5"}
hubm.create | {keepidle = 5, keepintv = 5, readtmo = 5, queuesize = 500000, budget = 500, maxnames = 50, clientnames = 50, name = "5", slow = 5}
clientm.create | "http://127.0.0.1:1/", {uid = "5", info = "5", ping = 5, pong = 5, timeout = 5, user = "5", password = "5", proxyport = 5, header = {a = "5"}}
mtlm.create | "5", {node = 5, keepalive = 5, keepintv = 2}
mtlm.create | "5", {ping = {timespan = 8, timeout = 2}}
connm.create | links, 0, {intf = "127.0.0.1"}
clusterm.create | require"smq.hub".create(), links, {name = "5"}
mqttbrokerm.create | 0, {address = "127.0.0.1", maxPacketSize = 500, maxClients = 5, plainPort = 0}
io:open | "a.txt", "r"
io:open | "5", "w"
io:stat | "5"
io:files | "5"
io:mkdir | "5d"
io:rmdir | "5"
io:remove | "5"
io:rename | "5", "6"
io:realpath | "5"
io:loadfile | "5"
io:dofile | "5"
file:read | 5
file:write | "5", 5
file:seek | 5
dir:insert | "5"
dir:setcors | {origins = "5", methods = "5", headers = "5", expose = "5", maxage = 5}
dir:service | request, "5"
resrdr:header | {a = "5", b = 5}
resrdr:maxage | 5
lockmgr:islocked | "5"
lockmgr:unlock | "5"
wfs:configure | {tmo = 5, helpuri = "5", logouturi = "5"}
request:data | "5"
request:header | "5"
request:cookie | "5"
request:allow | {"GET", "5"}
request:checktime | 5
request:rawrdr | 5
request:login | "5", 5
request:multipart | {}, 5
response:write | "5", 5
response:send | "5"
response:setheader | "5", "5"
response:containsheader | "5"
response:setstatus | 205
response:setcontenttype | "5"
response:setcontentlength | 5
response:setdateheader | "5", 5
response:setmaxage | 5
response:json | {5}
response:sendredirect | "5"
response:senderror | 404, "5"
response:include | "5"
response:forward | "5"
response:redirect | "5"
response:createcookie | "5"
response:encodeurl | "5"
response:encoderedirecturl | "5"
response:setbasic | "5"
response:reset | "all"
cookie:value | "5"
cookie:path | "5"
cookie:domain | "5"
cookie:maxage | 5
cookie:comment | "5"
session:maxinactiveinterval | 5
deferred:write | "5", 5
deferred:send | "5", 1
sock:read | 5
sock:write | "55555", 1, 5
sock:setoption | "keepalive", true, 5, 5
sock:queuelen | 5000
sock:maxsize | 5000
sock:trusted | "5"
sock:ping | "5"
sock:close | 1000, "5"
udp:read | 5
udp:sendto | "5", "127.0.0.1", 5
timer:set | 500, false
timer:reset | 500
symmetric:setauth | "5"
symmetric:encrypt | "5"
symmetric:decrypt | "5", "5"
jsonparser:parse | "5"
xparser:parse | "5"
datetime:offset | 5
datetime:tostring | 5
luasqlenv:connect | "5", {busytimeout = 500}
luasqlconn:execute | "5"
luasqlconn:mexec | "5"
luasqlconn:prepare | "5"
luasqlconn:commit | "5"
luasqlconn:setbusytimeout | 5
luasqlstmt:bind | "5"
luasqlstmt:bind | {{"INTEGER", 5}}
luasqlstmt:execute | 5
luasqlcur:fetch | {}, "n"
httpc:request | {url = "http://127.0.0.1:1/", method = "GET", size = 0, user = "5", password = "5", query = {a = "5"}, header = {a = "5"}}
httpc:write | "5"
httpc:read | 5
httpc:header | "5"
httpc:timeout | 500
httpm:post | "http://127.0.0.1:1/", {a = "5"}
httpm:json | "http://127.0.0.1:1/", {a = "5"}
httpm:stat | "http://127.0.0.1:1/"
httpm:upload | {url = "http://127.0.0.1:1/", io = ba.openio"home", name = "a.txt"}
httpm:download | {url = "http://127.0.0.1:1/", io = ba.openio"home", name = "5"}
smq:publish | "5", "a"
smq:publish | "5", 5, 5
smq:create | "a"
smq:createsub | "a"
smq:subscribe | "a", {subtopic = "5"}
smq:topic2tid | "5"
smq:tid2topic | 5
smq:setkeepalive | 5, 5
smq:queuesize | 5
smq:pubon | "5", 5, "a"
smqclient:create | "a", "a"
smqclient:publish | "5", "a"
smqclient:request | "5", "a"
smqclient:tid2topic | 5
smqclient:topic2tid | "5"
mqttc:publish | "5", "5", {qos = 1}
mqttc:subscribe | "5", print, {qos = 1, retainhandling = 1}
mqttc:unsubscribe | "5"
mqttc:setwill | {topic = "5", payload = "5", qos = 1}
mqttc:disconnect | 4
mqtt3c:publish | "5", "5", {qos = 1}
mqtt3c:subscribe | "5", print, {qos = 1}
mqttlocal:publish | "5", "5"
mqttlocal:subscribe | "5"
mqttlocal:unsubscribe | "5"
mqttlocal:setwill | {topic = "5", payload = "5"}
mtl:open | "5", print, print
mtl:isopen | "5"
mtl:close | "5", "5"
mtl:hascon | "5"
channel:send | "5", 5
channel:close | "5"
conn:setlist | {["127.0.0.1"] = 5}
conn:add | "127.0.0.1", 5
cluster:publish | "5", 5, "5"
cluster:pubon | "5", 5, "5"
cluster:shutdown | "5"
cluster:close | "5"
jsonuser:set | {a = {pwd = "5", maxusers = 5, inactive = 5}}
jsonuser:getpwd | "5"
acl:set | {a = {urls = {"5"}, methods = {"5"}, roles = {"5"}}}
acl:authorize | request, "5", "5"
authorizer:authorize | request, "5", "5"
authenticator:authenticate | request, "5"
certstore:addcert | ba.openio"home", "5"
mail:send | {from = "5", to = "5", subject = "5", body = "5"}
pty:read | 5
pty:write | "5"
pty:winsize | 5, 5
tcp:connect | "127.0.0.1", listening
tcp:bind | "127.0.0.1", 0
tcp:listen | 5
tcp:receive | 5, "5"
tcp:send | "55555", 1, 5
tcp:settimeout | 5
tcp:setstats | 5, 5, 5
tcp:setoption | "keepalive", true
sudp:setsockname | "127.0.0.1", 0
sudp:setpeername | "127.0.0.1", 5
sudp:send | "5"
sudp:sendto | "5", "127.0.0.1", 5
sudp:settimeout | 0
emitter:on | "5", print
emitter:setMaxListeners | 5
JSONS:send | {5}
"""
"""The calls."""

MEANS_ANOTHER = {
    "ba.json.encode": "1.1 1.2",
    "cbor.encode": "1",
    "socket.skip": "3",
    "response:write": "2",
    "jwt.sign": "1.exp",
    "ba.tpm.jwtsign": "1.exp",
    "emitter:on": "1",
    "rwfile.json": "3.1",
    "serpent.line": "1.1 1.2",
    "response:json": "1.1",
    "smq:publish": "2 3",
    "ltn12.source.string": "",
}
"""Places of calls where a number and its text are different values: what is written, encoded, or a topic's number."""
