-- require "log": mails of the kind that mako.log sends, with the settings of mako.conf (spec: bas-api §12).
local core = ...

return {sendmail = function(mail) return core.maillog.sendmail(mail) end, log = mako.log}
