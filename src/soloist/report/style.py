"""The style sheet of a report: light, few colours, one column on a phone; the views of tokens switch in here.

A radio button that is checked colours the tokens behind it: by class for the mask, by the token's own `--r`, `--a` or
`--v` for ratio, advantage and value.
"""

STYLE = """
:root{color-scheme:light;--ink:#2b2b2b;--quiet:#6b6b6b;--line:#e4e4e4}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:24px 20px 60px;font:15px/1.5 system-ui,sans-serif;color:var(--ink);
  background:#fff}
h1,b,td,pre,i,span{unicode-bidi:isolate}
h1{font-size:26px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 12px}
h3{font-size:16px;margin:0 0 4px}
.facts,.note,.cut,figcaption,summary,.legend{color:var(--quiet);font-size:13px}
.facts{margin:2px 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:10px;margin:20px 0}
.tiles div{border:1px solid var(--line);border-radius:6px;padding:10px 12px}
.tiles b{display:block;font-size:18px;white-space:nowrap;font-weight:600}
.tiles span{color:var(--quiet);font-size:13px}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:28px 32px}
figure{margin:0;min-width:0}
figure.wide{grid-column:1/-1}
img{width:100%;height:auto;display:block}
figure.wide .scroll img{min-width:760px}
figcaption{margin:4px 0 6px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:2px 14px 2px 0;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--line)}
summary{cursor:pointer}
.missing{border-left:3px solid #c8641e;padding:2px 0 2px 12px;margin:16px 0;font-size:14px}
.missing ul{margin:4px 0;padding-left:18px}
article{border-top:1px solid var(--line);padding:18px 0 8px}
.talk{margin:10px 0 14px}
.said{display:grid;grid-template-columns:120px minmax(0,1fr);gap:10px;padding:3px 0}
.said b{font-weight:500;color:var(--quiet);font-size:13px;overflow-wrap:anywhere}
pre{margin:0;font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;overflow:hidden}
.said.call pre{background:#eef4f8}
.said.tool pre{background:#f4f4f4}
.views input{position:absolute;opacity:0}
.views label{display:inline-block;padding:2px 12px;margin:0 6px 6px 0;border:1px solid var(--line);
  border-radius:14px;font-size:13px;cursor:pointer}
.views input:checked+label{background:var(--ink);color:#fff;border-color:var(--ink)}
.views input:focus-visible+label{outline:2px solid #1b6ca8}
.tokens{font:13px/1.9 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;overflow:hidden;
  border:1px solid var(--line);border-radius:6px;padding:8px 10px}
i{font-style:normal;border-radius:2px}
.tokens i{box-shadow:0 0 0 .5px #fff;padding:1px 0}
i.o{color:#8a8a8a}
.legend{display:none;margin:4px 0 6px}
.bar{display:inline-block;width:120px;height:10px;vertical-align:middle;border:1px solid var(--line)}
input.mask:checked~.legend.mask,input.ratio:checked~.legend.ratio,input.advantage:checked~.legend.advantage,
  input.value:checked~.legend.value{display:block}
input.mask:checked~.tokens i.a,.legend i.a{background:#cfe3f1}
input.mask:checked~.tokens i.x,.legend i.x{background:#f3c9a5;text-decoration:underline}
input.mask:checked~.tokens i.o{background:#f1f1f1}
.legend i{padding:1px 6px}
input.ratio:checked~.tokens i{background:var(--r)}
input.advantage:checked~.tokens i{background:var(--a)}
input.value:checked~.tokens i{background:var(--v)}
@media (max-width:560px){body{padding:16px 14px 40px}.said{grid-template-columns:1fr;gap:0}.tiles{
  grid-template-columns:repeat(2,1fr)}}
@media print{figure,.said{break-inside:avoid}}
"""
