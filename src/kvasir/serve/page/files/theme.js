// Sets the theme before the page is drawn: the chosen one, or that of the system. A classic script, so that it runs first.

{
  const dark = matchMedia("(prefers-color-scheme: dark)");

  globalThis.showTheme = () => {
    let chosen = "";
    try {
      chosen = JSON.parse(localStorage.getItem("kvasir.settings"))?.theme;
    } catch {
      // the browser forbids storage, or it holds something else
    }
    const isDark = chosen === "dark" || (chosen !== "light" && dark.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
  };

  dark.addEventListener("change", showTheme);
  showTheme();
}
