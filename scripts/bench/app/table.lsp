<!doctype html>
<title>Readings</title>
<table>
<?lsp for row = 1, 50 do ?>
<tr><td><?lsp=row?></td><td>sensor <?lsp=row?></td><td><?lsp=row * row % 97?></td></tr>
<?lsp end ?>
</table>
