<table>
<?lsp
local database = app.environment:connect(app.path)
local cursor = database:execute "SELECT name, value, number, day FROM readings WHERE id BETWEEN 100 AND 109"
local row = cursor:fetch({}, "a")
while row do
?><tr><td><?lsp=row.name?></td><td><?lsp=row.value?></td><td><?lsp=row.number?></td><td><?lsp=row.day?></td></tr>
<?lsp
   row = cursor:fetch(row, "a")
end
cursor:close()
database:close()
?></table>
