// Keeps a scrolling box at its end while its content grows, unless the reader has scrolled up.

const NEAR = 30; // pixels from the end; scrolling down to there follows the end again

export class End {
  constructor(box) {
    this.box = box;
    this.top = 0; // the last scroll position
    this.kept = true;
    box.addEventListener("scroll", () => this.scrolled());
    new ResizeObserver(() => this.keep()).observe(box); // the composer changes its height
  }

  get below() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight;
  }

  /** Growing content does not scroll. An upward move comes from the reader, or from content that became shorter: then
   *  the end is visible. */
  scrolled() {
    const isUp = this.box.scrollTop < this.top;
    this.top = this.box.scrollTop;
    if (isUp && this.below > 1) this.kept = false;
    else if (this.below < NEAR) this.kept = true;
    this.box.classList.toggle("following", this.kept);
  }

  go() {
    this.kept = true;
    this.keep();
  }

  /** Call this after the content has changed. */
  keep() {
    if (this.kept) this.box.scrollTop = this.box.scrollHeight;
    this.box.classList.toggle("following", this.kept);
  }
}
