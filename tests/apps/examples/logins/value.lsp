<?lsp response:write(tostring(load("local app = ... return " .. request:data "of")(app))) ?>
