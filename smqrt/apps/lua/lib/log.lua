-- require "log": mails with the settings of mako.conf, as mako.log sends them (spec: bas-api §12).
local core = ...

return {sendmail = function(mail) return core.maillog.sendmail(mail) end, log = mako.log}
