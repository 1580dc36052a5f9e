//! Retained QEMUs: the stopped QEMUs of guests that left, until their memory is cached.

use crate::host::lock::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// The QEMUs that this host retains.
#[derive(Default)]
pub(crate) struct RetainedQemus {
    guests: Mutex<HashMap<String, Arc<Retained>>>,
    /// Held while a memory is written: one at a time.
    pub(crate) turn: Mutex<()>,
}

pub(crate) struct Retained {
    pub(crate) gives_way: AtomicBool,
    gone: watch::Sender<bool>,
}

impl RetainedQemus {
    fn find(&self, guest: &str) -> Option<Arc<Retained>> {
        let guests = lock(&self.guests);
        guests.get(guest).cloned()
    }

    pub(crate) fn add(&self, guest: &str) -> Arc<Retained> {
        let stands = Arc::new(Retained {
            gives_way: AtomicBool::new(false),
            gone: watch::Sender::new(false),
        });
        let mut guests = lock(&self.guests);
        guests.insert(guest.to_owned(), stands.clone());
        stands
    }

    pub(crate) fn remove(&self, guest: &str) {
        let mut guests = lock(&self.guests);
        if let Some(stands) = guests.remove(guest) {
            stands.gone.send_replace(true);
        }
    }

    /// Returns whether the QEMU of this guest is retained only for its memory.
    pub(crate) fn has(&self, guest: &str) -> bool {
        self.find(guest).is_some()
    }

    /// Ends a guest's retained QEMU now, if there is one.
    pub(crate) async fn give_way(&self, guest: &str) {
        let Some(stands) = self.find(guest) else {
            return;
        };
        stands.gives_way.store(true, Ordering::Relaxed);
        // The task that retains it ends only after the QEMU is gone.
        let _ = stands.gone.subscribe().wait_for(|gone| *gone).await;
    }

    /// Ends all retained QEMUs now. Returns whether there were any.
    pub(crate) async fn make_way(&self) -> bool {
        let guests: Vec<String> = {
            let guests = lock(&self.guests);
            let all = guests.values();
            all.for_each(|stands| stands.gives_way.store(true, Ordering::Relaxed));
            guests.keys().cloned().collect()
        };
        for guest in &guests {
            self.give_way(guest).await;
        }
        !guests.is_empty()
    }
}
