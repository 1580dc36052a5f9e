//! Runs the threads that write and verify pages, and keeps their counters.

use crate::content::{Content, Random};
use crate::page::PAGE_BYTES;
use crate::pages::{Fault, Pages};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(2);
/// The maximum delay of a command while there is no other work.
const TICK_IDLE: Duration = Duration::from_millis(20);
/// The maximum backlog of late work, so that no burst follows a pause.
const LONGEST_DEBT: Duration = Duration::from_millis(50);
const FAULTS_KEPT: usize = 64;

/// The content of the arena and how it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) content: Content,
    pub(crate) arena_bytes: u64,
    /// Pages written per second, by all writers together.
    pub(crate) pages_per_s: u64,
    /// The part of the arena that is written; 0: all of it.
    pub(crate) working_set_bytes: u64,
    /// The part of the working set that gets `hot_percent` of the writes; 0: none.
    pub(crate) hot_bytes: u64,
    pub(crate) hot_percent: u64,
    pub(crate) write_bytes: u64,
    /// Pages verified per second in turn, continuously.
    pub(crate) verify_pages_per_s: u64,
    pub(crate) writers: u64,
    pub(crate) seed: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            content: Content::Mix,
            arena_bytes: 64 << 20,
            pages_per_s: 0,
            working_set_bytes: 0,
            hot_bytes: 0,
            hot_percent: 90,
            write_bytes: 512,
            verify_pages_per_s: 1000,
            writers: 1,
            seed: 1,
        }
    }
}

/// State shared between the worker threads and the thread that talks to the laboratory.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) writes: AtomicU64,
    pub(crate) verified: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) pages_per_s: AtomicU64,
    faults: Mutex<VecDeque<Fault>>,
    answers: Mutex<VecDeque<Answer>>,
    stop: AtomicBool,
}

/// A result of a thread, for the laboratory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The arena is filled and the writers run.
    Started { id: u64, pages: u64 },
    /// Every page was verified.
    Verified { id: u64, pages: u64, errors: u64 },
}

impl Shared {
    pub(crate) fn take_fault(&self) -> Option<Fault> {
        lock(&self.faults).pop_front()
    }

    pub(crate) fn take_answer(&self) -> Option<Answer> {
        lock(&self.answers).pop_front()
    }

    fn count_fault(&self, fault: Fault) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        let mut faults = lock(&self.faults);
        if faults.len() < FAULTS_KEPT {
            faults.push_back(fault);
        }
    }

    fn answer(&self, answer: Answer) {
        lock(&self.answers).push_back(answer);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A running arena.
pub(crate) struct Work {
    pub(crate) shared: Arc<Shared>,
    /// Number of the waiting `verify` command, 0 if there is none.
    verify_id: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Work {
    /// Fills the arena in a thread of its own, then writes and verifies until dropped.
    pub(crate) fn start(plan: Plan, id: u64) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        shared
            .pages_per_s
            .store(plan.pages_per_s, Ordering::Relaxed);
        let verify_id = Arc::new(AtomicU64::new(0));
        let thread = thread::Builder::new().spawn({
            let (shared, verify_id) = (shared.clone(), verify_id.clone());
            move || run(&plan, id, &shared, &verify_id)
        })?;
        Ok(Self {
            shared,
            verify_id,
            thread: Some(thread),
        })
    }

    /// Starts to verify every page; returns false where such a command is still under way.
    pub(crate) fn verify(&self, id: u64) -> bool {
        self.verify_id
            .compare_exchange(0, id, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn run(plan: &Plan, id: u64, shared: &Shared, verify_id: &AtomicU64) {
    let count = usize::try_from(plan.arena_bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
    let pages = Pages::new(count.max(1), plan.content, plan.seed);
    shared.answer(Answer::Started {
        id,
        pages: pages.count() as u64,
    });
    thread::scope(|scope| {
        for number in 0..plan.writers.max(1) {
            let pages = &pages;
            scope.spawn(move || write(pages, plan, number, shared));
        }
        verify(&pages, plan, shared, verify_id);
    });
}

fn write(pages: &Pages, plan: &Plan, number: u64, shared: &Shared) {
    let mut random = Random::new(plan.seed ^ (number << 32) ^ 0x5749);
    let mut pace = Pace::new();
    let targets = Targets::new(plan, pages.count());
    while !shared.stopped() {
        let rate = shared.pages_per_s.load(Ordering::Relaxed) as f64;
        for _ in 0..pace.due(rate / plan.writers.max(1) as f64) {
            let first = targets.choose(&mut random);
            for step in 0..targets.working_set {
                let index = (first + step) % targets.working_set;
                match pages.write(index, plan.write_bytes as usize, &mut random) {
                    Ok(false) => continue,
                    Ok(true) => {
                        shared.writes.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(fault) => shared.count_fault(fault),
                }
                break;
            }
        }
        pace.pause(rate / plan.writers.max(1) as f64);
    }
}

fn verify(pages: &Pages, plan: &Plan, shared: &Shared, verify_id: &AtomicU64) {
    let mut next = 0;
    let mut pace = Pace::new();
    while !shared.stopped() {
        let id = verify_id.load(Ordering::Relaxed);
        if id != 0 {
            let errors = (0..pages.count()).filter(|index| !verify_one(pages, *index, shared));
            let errors = errors.count() as u64;
            verify_id.store(0, Ordering::Relaxed);
            shared.answer(Answer::Verified {
                id,
                pages: pages.count() as u64,
                errors,
            });
        }
        for _ in 0..pace.due(plan.verify_pages_per_s as f64) {
            verify_one(pages, next, shared);
            next = (next + 1) % pages.count();
        }
        pace.pause(plan.verify_pages_per_s as f64);
    }
}

fn verify_one(pages: &Pages, index: usize, shared: &Shared) -> bool {
    let result = pages.verify(index);
    shared.verified.fetch_add(1, Ordering::Relaxed);
    match result {
        Ok(()) => true,
        Err(fault) => {
            shared.count_fault(fault);
            false
        }
    }
}

/// The choice of the pages to write, and their frequency.
struct Targets {
    working_set: usize,
    hot: usize,
    hot_percent: usize,
}

impl Targets {
    fn new(plan: &Plan, count: usize) -> Self {
        let pages = |bytes: u64| (bytes as usize / PAGE_BYTES).min(count);
        let working_set = match pages(plan.working_set_bytes) {
            0 => count,
            some => some,
        };
        let hot = pages(plan.hot_bytes).min(working_set);
        Self {
            working_set,
            hot,
            hot_percent: plan.hot_percent as usize,
        }
    }

    fn choose(&self, random: &mut Random) -> usize {
        if self.hot > 0 && random.below(100) < self.hot_percent {
            random.below(self.hot)
        } else {
            random.below(self.working_set)
        }
    }
}

/// Computes the amount of work due at a rate, tick by tick.
struct Pace {
    last: Instant,
    debt: f64,
}

impl Pace {
    fn new() -> Self {
        Self {
            last: Instant::now(),
            debt: 0.0,
        }
    }

    fn due(&mut self, rate: f64) -> u64 {
        let now = Instant::now();
        self.debt += rate * (now - self.last).as_secs_f64();
        self.debt = self.debt.min(1.0 + rate * LONGEST_DEBT.as_secs_f64());
        self.last = now;
        let due = self.debt.floor();
        self.debt -= due;
        due as u64
    }

    /// Waits until work may be due; an idle arena should cost its host little.
    fn pause(&self, rate: f64) {
        let until_due = (1.0 - self.debt) / rate.max(1.0);
        let longest = TICK_IDLE.as_secs_f64();
        let pause = Duration::from_secs_f64(until_due.clamp(0.0, longest));
        thread::sleep(pause.max(TICK));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_and_verifies_until_dropped() {
        let plan = Plan {
            arena_bytes: 1 << 20,
            pages_per_s: 2000,
            writers: 2,
            ..Plan::default()
        };
        let work = Work::start(plan, 3).unwrap();
        assert_eq!(wait(&work), Answer::Started { id: 3, pages: 256 });
        while work.shared.writes.load(Ordering::Relaxed) < 100 {
            thread::sleep(TICK);
        }
        assert!(work.verify(9));
        assert_eq!(
            wait(&work),
            Answer::Verified {
                id: 9,
                pages: 256,
                errors: 0
            }
        );
        assert_eq!(work.shared.errors.load(Ordering::Relaxed), 0);
        assert_eq!(work.shared.take_fault(), None);
    }

    #[test]
    fn hot_pages_get_their_share() {
        let plan = Plan {
            working_set_bytes: 400 << 12,
            hot_bytes: 10 << 12,
            ..Plan::default()
        };
        let targets = Targets::new(&plan, 1000);
        let mut random = Random::new(2);
        let chosen: Vec<usize> = (0..10_000).map(|_| targets.choose(&mut random)).collect();
        assert!(chosen.iter().all(|index| *index < 400));
        let hot = chosen.iter().filter(|index| **index < 10).count();
        assert!((8_900..9_200).contains(&hot), "{hot}");
    }

    fn wait(work: &Work) -> Answer {
        loop {
            match work.shared.take_answer() {
                Some(answer) => return answer,
                None => thread::sleep(TICK),
            }
        }
    }
}
