/* How the website's search orders what it finds (Sphinx's html_search_scorer): first the page that wayfinding.py lists
   for these words, which Sphinx gives 100 points; then what is in a title before what is in a text, a chapter before
   the glossary, and both before other pages.
*/
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([docname, , , , score]) => {
    const listed = score >= 100;
    const inTitle = score >= 15;
    const chapter = /^chapters\/[01]\d_/.test(docname);
    return score + 1000 * listed + 100 * inTitle + (chapter ? (inTitle ? 250 : 1) : 0);
  },
};
