//! Work shared out among the threads of the current rayon pool.

use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Does every task, the first ones first, each thread on scratch memory of its own. Tasks must not depend on each
/// other; then neither does the result on who does which.
pub(super) fn share<Task: Send, Scratch>(
    tasks: Vec<Task>,
    scratch: impl Fn() -> Scratch + Sync,
    work: impl Fn(&mut Scratch, Task) + Sync,
) {
    let threads = rayon::current_num_threads().min(tasks.len());
    let queue = Mutex::new(tasks.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    on_threads(threads, &|| {
        let mut scratch = scratch();
        while let Some(task) = next() {
            work(&mut scratch, task);
        }
    });
}

/// Calls `work` once on each of so many threads. Not generic, so that rayon's part is compiled once.
fn on_threads(threads: usize, work: &(dyn Fn() + Sync)) {
    match threads {
        0 => (),
        1 => work(),
        _ => (0..threads)
            .into_par_iter()
            .with_max_len(1)
            .for_each(|_| work()),
    }
}

/// Takes the first `len` elements off `rest`.
pub(super) fn take<'a, X>(rest: &mut &'a mut [X], len: usize) -> &'a mut [X] {
    rest.split_off_mut(..len).unwrap_or_default()
}
