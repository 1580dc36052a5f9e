//! Leases: one generation of a guest is given to one host, durably, for ever.

use super::realm::Write;
use super::{ConnId, LeaseEntry, Record, Server};
use crate::Now;
use crate::key::RealmId;
use crate::membership::Standing;
use crate::protocol::{Lease, LeaseAnswer, LeaseRequest, RefusedCode, ToHost};
use longhaul_protocol::HostId;

/// What a request changes.
enum Step {
    /// Write the entry, then answer.
    Write(LeaseEntry, LeaseAnswer),
    /// The answer is durable already.
    Answer(LeaseAnswer),
}

/// Asks for a lease. Pure, so that its cases can be tested one by one.
fn acquire(entry: Option<LeaseEntry>, host: HostId, asked: &LeaseRequest, sure: bool) -> Step {
    let generation = asked.generation;
    let new = Lease {
        generation,
        holder: host,
        released: false,
    };
    let Some(entry) = entry else {
        let entry = LeaseEntry {
            latest: new,
            before: None,
        };
        return Step::Write(entry, LeaseAnswer::Granted { before: None });
    };
    let latest = entry.latest;
    if generation > latest.generation {
        let before = Some(latest);
        let entry = LeaseEntry {
            latest: new,
            before,
        };
        return Step::Write(entry, LeaseAnswer::Granted { before });
    }
    let own = latest == new;
    let granted = LeaseAnswer::Granted {
        before: entry.before,
    };
    match (own, sure) {
        (true, true) => Step::Answer(granted),
        (true, false) => Step::Write(entry, granted),
        (false, true) => Step::Answer(LeaseAnswer::Refused { latest }),
        (false, false) => Step::Write(entry, LeaseAnswer::Refused { latest }),
    }
}

/// Releases a lease, the latest one or the one before it.
fn release(entry: Option<LeaseEntry>, host: HostId, asked: &LeaseRequest) -> Option<Step> {
    let mut entry = entry?;
    let is_it = |lease: &Lease| lease.generation == asked.generation && lease.holder == host;
    if is_it(&entry.latest) {
        entry.latest.released = true;
    } else if let Some(before) = entry.before.as_mut().filter(|before| is_it(before)) {
        before.released = true;
    } else {
        let latest = entry.latest;
        return Some(Step::Answer(LeaseAnswer::Refused { latest }));
    }
    Some(Step::Write(entry, LeaseAnswer::Released))
}

impl Server {
    pub(super) fn acquire(&mut self, now: Now, conn: ConnId, realm: RealmId, asked: LeaseRequest) {
        let Some(host) = self.may_lease(now, conn, realm, &asked) else {
            return;
        };
        let limits = self.config.limits;
        let Some(state) = self.realms.get(&realm) else {
            return;
        };
        let entry = state.leases.get(&asked.guest).copied();
        let sure = !state.unsure.contains(&asked.guest);
        let full = || {
            let held = state.leases.values();
            let held = held.filter(|entry| entry.latest.holder == host).count();
            state.leases.len() >= limits.leases || held >= limits.leases_per_host
        };
        if entry.is_none() && full() {
            self.counters.limited += 1;
            let text = "the arbiter keeps leases of no more guests for this host";
            let hint = "resolve handovers in doubt by hand (docs/handover.md)";
            return self.refuse(conn, asked.request, RefusedCode::Limit, text, Some(hint));
        }
        let step = acquire(entry, host, &asked, sure);
        self.step_lease(conn, realm, asked, step);
    }

    pub(super) fn release(&mut self, now: Now, conn: ConnId, realm: RealmId, asked: LeaseRequest) {
        let Some(host) = self.may_lease(now, conn, realm, &asked) else {
            return;
        };
        let entry = self.realms.get(&realm).and_then(|state| {
            let entry = state.leases.get(&asked.guest);
            entry.copied()
        });
        let Some(step) = release(entry, host, &asked) else {
            let text = "the guest has no lease here";
            return self.refuse(conn, asked.request, RefusedCode::NotHere, text, None);
        };
        self.step_lease(conn, realm, asked, step);
    }

    /// Returns the host if this server gives leases of this store to it now.
    fn may_lease(
        &mut self,
        now: Now,
        conn: ConnId,
        realm: RealmId,
        asked: &LeaseRequest,
    ) -> Option<HostId> {
        let host = self.conns.get(&conn)?.host;
        let state = self.realms.get(&realm)?;
        let arbiter = state.membership.ruleset()?.arbiter;
        let standing = state.membership.standing(host, now.unix_s);
        let member = matches!(standing, Standing::Member(_));
        let ours = arbiter.is_some_and(|arbiter| {
            arbiter.server == self.config.id
                && arbiter.store == self.store
                && asked.store == self.store
        });
        if !ours || !member {
            self.counters.leases_refused += 1;
            let text = "this server gives no leases, or not from this store";
            let hint = "the ruleset names the arbiter; resolve by hand (docs/handover.md)";
            let code = RefusedCode::NotArbiter;
            self.refuse(conn, asked.request, code, text, Some(hint));
            return None;
        }
        if state.writing.contains(&asked.guest) {
            self.storage_busy(conn, asked.request);
            return None;
        }
        Some(host)
    }

    fn storage_busy(&mut self, conn: ConnId, request: u32) {
        let text = "a lease of this guest is being written: ask again";
        self.refuse(conn, request, RefusedCode::Storage, text, None);
    }

    fn step_lease(&mut self, conn: ConnId, realm: RealmId, asked: LeaseRequest, step: Step) {
        let request = asked.request;
        match step {
            Step::Answer(answer) => self.answer_lease(conn, request, answer),
            Step::Write(entry, answer) => {
                let guest = asked.guest;
                if let Some(state) = self.realms.get_mut(&realm) {
                    state.leases.insert(guest.clone(), entry);
                    state.writing.insert(guest.clone());
                }
                let record = Record::Lease {
                    realm,
                    guest: guest.clone(),
                    entry,
                };
                let then = Write::Lease {
                    realm,
                    guest,
                    conn,
                    request,
                    answer,
                };
                self.persist(record, then);
            }
        }
    }

    /// A failed write may have reached the disk: the entry stays as it would be then, and nothing
    /// is answered from it before another write succeeds.
    pub(super) fn lease_written(
        &mut self,
        realm: RealmId,
        guest: &str,
        conn: ConnId,
        request: u32,
        answer: LeaseAnswer,
        durable: bool,
    ) {
        if let Some(state) = self.realms.get_mut(&realm) {
            state.writing.remove(guest);
            match durable {
                true => state.unsure.remove(guest),
                false => state.unsure.insert(guest.to_owned()),
            };
        }
        match (durable, self.conns.contains_key(&conn)) {
            (true, true) => self.answer_lease(conn, request, answer),
            (false, true) => self.storage_fails(conn, request),
            // The host asks again.
            (_, false) => {}
        }
    }

    fn answer_lease(&mut self, conn: ConnId, request: u32, answer: LeaseAnswer) {
        match answer {
            LeaseAnswer::Granted { .. } => self.counters.leases += 1,
            LeaseAnswer::Refused { .. } => self.counters.leases_refused += 1,
            LeaseAnswer::Released => {}
        }
        let message = ToHost::Lease { request, answer };
        self.actions.push_back(super::Action::Send(conn, message));
    }
}
