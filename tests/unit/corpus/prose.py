"""Prose in three languages, written for these tests: the same little report, as a web page would have it."""

from __future__ import annotations

ENGLISH = """The old lighthouse keeper

For forty years Margaret Hale climbed the hundred and twelve steps of the lighthouse every evening, lit the lamp and
wrote the weather into her book. On Friday she did it for the last time, because a small computer will do the work from
now on. "I will miss the stairs least of all," she said, and laughed.

The harbour office gave her a brass telescope and the first of her books, which she had believed lost. In it one can
read that the winter of 1987 brought eleven storms, that a fishing boat called Grace was saved with all its crew, and
that a young seal lived below the rocks until the spring. Nobody knows who will feed the gulls in the future.

Visitors may see the tower on Sundays between ten and four o'clock. It costs nothing, but those who have enjoyed the
view are asked to leave something for the repair of the roof, which has been waiting for it since last autumn.
"""

GERMAN = """Die alte Leuchtturmwärterin

Vierzig Jahre lang stieg Margarete Hansen jeden Abend die hundertzwölf Stufen des Leuchtturms hinauf, zündete die Lampe
an und schrieb das Wetter in ihr Buch. Am Freitag tat sie es zum letzten Mal, denn von nun an übernimmt ein kleiner
Rechner diese Arbeit. „Die Treppe werde ich am wenigsten vermissen“, sagte sie und lachte.

Das Hafenamt schenkte ihr ein Fernrohr aus Messing und das erste ihrer Bücher, das sie für verloren gehalten hatte.
Darin kann man lesen, dass der Winter 1987 elf Stürme brachte, dass ein Fischerboot namens Anna mit der ganzen
Mannschaft gerettet wurde und dass bis zum Frühling ein junger Seehund unter den Felsen lebte. Wer in Zukunft die Möwen
füttert, das weiß niemand.

Besucher können den Turm sonntags zwischen zehn und sechzehn Uhr besichtigen. Der Eintritt ist frei, doch wer die
Aussicht genossen hat, wird um eine Spende für die Reparatur des Daches gebeten, die seit dem letzten Herbst aussteht.
"""

JAPANESE = """灯台守の最後の夜

四十年のあいだ、春田まさ子さんは毎晩灯台の百十二段の階段をのぼり、明かりをともし、その日の天気を帳面に書きつけてきた。金曜日、その仕事が
最後の日を迎えた。これからは小さな計算機が代わりをつとめるからである。「階段だけは懐かしく思わないでしょうね」と彼女は言って笑った。

港の役所からは真鍮の望遠鏡と、なくしたと思っていた一冊目の帳面が贈られた。そこには、一九八七年の冬に嵐が十一回来たこと、恵丸という漁船が
乗組員全員とともに救われたこと、そして若いあざらしが春まで岩の下に住んでいたことが記されている。これから誰がかもめに餌をやるのかは、まだ誰も
知らない。

塔は日曜日の十時から四時まで見学できる。入場は無料だが、眺めを楽しんだ人には、去年の秋から待っている屋根の修理のために、いくらかの寄付をお願い
しているという。
"""

TEXTS = {"en": ENGLISH, "de": GERMAN, "ja": JAPANESE}
