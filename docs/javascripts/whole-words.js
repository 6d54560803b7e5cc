// Commands in sentences and tables wrap between words, not behind the hyphens of a flag.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (!code.firstElementChild) code.innerHTML = code.innerHTML.replace(/\S*-\S*/g, '<span class="word">$&</span>');
}
