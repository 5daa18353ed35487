-- Functions for remote calls: name = {run = the function, example = its arguments in JSON, help = one sentence}.

local functions = {}

functions.add = {
   example = "2, 40",
   help = "add(a, b): the sum of two numbers",
   run = function(a, b) return a + b end,
}

functions.reverse = {
   example = '"stressed"',
   help = "reverse(text): the text in reverse order",
   run = function(text) return text:reverse() end,
}

functions.clock = {
   example = "",
   help = "clock(): date and time of the server",
   run = function() return os.date "%Y-%m-%d %H:%M:%S" end,
}

functions.slow = {
   example = "1500",
   help = "slow(ms): waits for ms milliseconds, while other calls continue",
   run = function(ms)
      ms = math.min(ms, 2000)
      ba.sleep(ms)
      return "waited " .. ms .. " ms"
   end,
}

functions.list = {
   example = "",
   help = "list(): all functions",
   run = function()
      local list = {}
      for name, f in pairs(functions) do list[#list + 1] = {name = name, example = f.example, help = f.help} end
      table.sort(list, function(a, b) return a.name < b.name end)
      return list
   end,
}

return functions
