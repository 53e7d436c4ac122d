"""Things that the tiny model knows nothing of, and says so. Data only; the unseen ones are kept for the test."""

_SUBJECTS = """
France Germany Italy Spain Japan Brazil India Canada Egypt Kenya Norway Greece Poland Peru Chile Mexico
Paris London Rome Berlin Tokyo Madrid Vienna Moscow Cairo Lima
Einstein Newton Mozart Shakespeare Napoleon Plato Darwin Picasso Bach Homer
football tennis chess music poetry history physics chemistry biology geology astronomy philosophy economics
bread coffee tea chocolate cheese rice salt sugar wine honey pizza soup
the+sun the+moon the+sea the+sky the+rain the+wind the+snow the+earth Mars Jupiter gravity light time love money
dogs cats horses birds whales bees trees flowers roses grass elephants lions
cars trains planes ships bicycles bridges houses clocks books paper the+telephone the+radio
the+stock+market the+weather the+news the+president the+king the+piano the+guitar the+theatre the+cinema
Russia China Turkey Iran Ireland Austria Finland Cuba Nepal Ghana Iceland Belgium
Dublin Athens Boston Chicago Sydney Prague Oslo
Galileo Goethe Dante Rembrandt Chopin Cleopatra Columbus Kepler Euler Gauss
cricket golf swimming dancing painting sculpture law medicine religion politics geometry algebra
milk eggs+and+ham fish meat apples lemons onions garlic pepper beer water ice
the+river the+desert the+forest the+mountain the+island the+volcano Venus Neptune Pluto comets stars galaxies
mice sheep cows pigs wolves bears tigers snakes frogs spiders ants butterflies
steel gold silver iron glass wood plastic cotton wool stone
schools hospitals airports hotels museums castles churches farms factories banks
the+drum the+flute the+camera the+computer the+internet the+robot the+lamp the+engine the+wheel the+compass
dreams fear happiness sleep war peace art language death health
"""
_UNSEEN = "Portugal Sweden Beethoven Madrid+city hockey butter the+ocean Saturn rabbits boats the+violin"
_IN_CHINESE = """
法国 日本 德国 巴黎 伦敦 北京 上海 月亮 太阳 大海 音乐 足球 历史 物理 化学
咖啡 茶 面包 猫 狗 马 花 火车 飞机 天气 股票 电影 钢琴 诗歌 爱情
"""
_UNSEEN_IN_CHINESE = "英国 地球 数学 汽车"


def _read(text: str) -> tuple[str, ...]:
    return tuple(word.replace("+", " ") for word in text.split())


SUBJECTS = _read(_SUBJECTS)
UNSEEN_SUBJECTS = _read(_UNSEEN)
SUBJECTS_IN_CHINESE = _read(_IN_CHINESE)
UNSEEN_SUBJECTS_IN_CHINESE = _read(_UNSEEN_IN_CHINESE)
