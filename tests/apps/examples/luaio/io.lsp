<?lsp
local io = app.store
print(type(io), io:resourcetype())
print(io:stat"index.html".size, io:stat"lib".isdir, io:stat"lib".type, io:stat"".isdir, io:stat"/lib/../index.html".name)
print(io:stat"none")
print(io:stat"../x")
print(io:open"none")
print(io:open"odd")
print(io:open"crash")
local f = io:open"index.html"
print(type(f), f:getio() == io, f:read(4), f:read(), f:read(), f:seek(1), f:read"a", f:read"a")
print(f:close(), f:close(), pcall(f.read, f))
f = io:open("new", "w")
print(f:write("a", 1, 2.5), f:flush(), f:close(), io:open"new":read"a")
f = io:open("big", "w")
print(f:write(("x"):rep(1000001)))
print(io:mkdir"d", io:mkdir"d")
print(io:rename("new", "d/new"), io:stat"new")
print(io:remove"d/new", io:remove"d/new")
print(io:rmdir"d")
local names = {}
for name, isdir, mtime, size in io:files("/", true) do names[#names + 1] = name .. ":" .. tostring(isdir) .. ":" .. mtime .. ":" .. size end
print(table.concat(names, " "))
print(pcall(io.files, io, "none"))
print(io:dofile("lib/answer.lua", app))
print(io:loadfile"none")
local lib = ba.mkio(io, "lib")
print(type(lib), lib:resourcetype(), lib:stat"answer.lua".size, lib:stat"../index.html")
print(ba.mkio(io, "none"))
print(ba.mkio(lib, ""):open"/answer.lua":read(5))
print(io:realpath"x")
print(pcall(f.read, f, -1))
print(app.site:io() == io)
print(pcall(ba.create.luaio)) print(pcall(ba.create.luaio, {open = 1}))
local empty = ba.create.luaio{}
print(empty:stat"x") print(empty:open"x") print(empty:stat"".isdir) print(empty:mkdir"x")
local told
table.sort({2, 1}, function(a, b) told = told or select(2, pcall(io.open, io, "index.html")) return a < b end)
print(told)
?>
