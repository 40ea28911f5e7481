//! The last few values used, by what they were made from.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The `N` values that were used last, looked up by key.
pub(crate) struct Recent<K, V, const N: usize>(Mutex<VecDeque<(K, Arc<V>)>>);

impl<K: PartialEq, V, const N: usize> Recent<K, V, N> {
    pub const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    pub fn get(&self, key: &K) -> Option<Arc<V>> {
        let mut all = self.lock();
        let at = all.iter().position(|(other, _)| other == key)?;
        let used = all.remove(at)?;
        let value = used.1.clone();
        all.push_front(used);
        Some(value)
    }

    /// Adds a value and gives out the one that it displaces: the one unused for longest, if there are enough.
    pub fn add(&self, key: K, value: Arc<V>) -> Option<Arc<V>> {
        let mut all = self.lock();
        all.push_front((key, value));
        let unused = if all.len() > N { all.pop_back() } else { None };
        unused.map(|(_, value)| value)
    }

    /// A thread that panicked has left nothing half done.
    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<(K, Arc<V>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_finds_what_was_used_last_and_gives_out_the_rest() {
        let recent = Recent::<u8, &str, 2>::new();
        assert!(recent.get(&1).is_none());
        assert!(recent.add(1, Arc::new("one")).is_none());
        assert!(recent.add(2, Arc::new("two")).is_none());
        assert_eq!(recent.get(&1).as_deref(), Some(&"one"));
        assert_eq!(recent.add(3, Arc::new("three")).as_deref(), Some(&"two"));
        assert!(recent.get(&2).is_none());
        assert_eq!(recent.get(&1).as_deref(), Some(&"one"));
        assert_eq!(recent.get(&3).as_deref(), Some(&"three"));
    }
}
