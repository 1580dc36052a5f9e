//! Rulesets and enrolments at a host: from servers, from other hosts, to the disk.

use super::{Action, GOSSIP, Member, Notice, RETRY, Record, Write};
use crate::Now;
use crate::enrolment::Enrolment;
use crate::membership::{EnrolError, RulesetError, Standing, Why};
use crate::protocol::Gossip;
use crate::relay::Bucket;
use crate::ruleset::{NotNewer, SignedRuleset, VerifiedRuleset};
use crate::server::WriteId;
use longhaul_protocol::HostId;

impl Member {
    fn persist(&mut self, record: Record, then: Write) {
        let id = WriteId(self.next_write);
        self.next_write += 1;
        self.writes.insert(id, then);
        self.act(Action::Persist(id, record));
    }

    /// A ruleset from anyone: what counts is the realm's signature.
    pub(super) fn ruleset(&mut self, from: HostId, ruleset: &SignedRuleset) {
        match self.membership.judge(ruleset) {
            Ok(verified) if verified.content().version > self.version_writing => {
                self.version_writing = verified.content().version;
                let record = Record::Ruleset(verified.signed().clone());
                self.persist(record, Write::Ruleset(Box::new(verified)));
            }
            Ok(_) | Err(RulesetError::NotNewer(NotNewer::Same { .. } | NotNewer::Older { .. })) => {
            }
            Err(error) => self.notice(Notice::Document(from, error.to_string())),
        }
    }

    pub(super) fn written(&mut self, now: Now, write: WriteId, durable: bool) {
        let Some(Write::Ruleset(ruleset)) = self.writes.remove(&write) else {
            return;
        };
        if !durable {
            self.version_writing = 0;
            self.retry_at = Some(now.steady + RETRY);
            self.notice(Notice::Storage);
        }
        self.install(now, *ruleset);
    }

    pub(super) fn write_again(&mut self) {
        let ruleset = self.membership.verified().cloned();
        if let Some(ruleset) = ruleset {
            let record = Record::Ruleset(ruleset.signed().clone());
            self.persist(record, Write::Ruleset(Box::new(ruleset)));
        }
    }

    fn install(&mut self, now: Now, ruleset: VerifiedRuleset) {
        if ruleset.replaces(self.membership.verified()).is_err() {
            return;
        }
        let taken = self.membership.install(ruleset, now.unix_s);
        if let Some(behind_s) = taken.clock_behind_s {
            self.notice(Notice::ClockBehind(behind_s));
        }
        self.act(Action::Changed);
        self.cut_strangers(now);
        self.follow_servers(now);
        for server in self.registered_servers() {
            self.give_ruleset(server);
        }
        self.tell_peers();
    }

    pub(super) fn enrolments(&mut self, now: Now, from: HostId, enrolments: &[Enrolment]) {
        let mut changed = false;
        for enrolment in enrolments {
            match self.membership.enrol(enrolment, now.unix_s) {
                Ok(true) => {
                    changed = true;
                    self.persist(Record::Enrolment(Box::new(enrolment.clone())), Write::Other);
                    self.report_twice(enrolment);
                }
                Ok(false) | Err(EnrolError::Void(_)) => {}
                Err(error) => self.notice(Notice::Document(from, error.to_string())),
            }
        }
        if changed {
            self.act(Action::Changed);
            self.cut_strangers(now);
            self.tell_peers();
        }
    }

    fn report_twice(&mut self, enrolment: &Enrolment) {
        let Ok(verified) = enrolment.verify(self.config.realm) else {
            return;
        };
        let of_token = self.membership.enrolments();
        let of_token = of_token.filter(|other| other.token() == verified.token());
        let hosts: Vec<HostId> = of_token.map(|other| other.host()).collect();
        if hosts.len() > 1 {
            self.notice(Notice::TokenUsedTwice(hosts));
        }
    }

    /// Ends connections with hosts that are no members any more.
    pub(super) fn cut_strangers(&mut self, now: Now) {
        let peers: Vec<HostId> = self.peers.keys().copied().collect();
        for host in peers {
            if let Standing::Stranger(why) = self.membership.standing(host, now.unix_s) {
                self.peers.remove(&host);
                self.act(Action::Cut(host, why));
            }
        }
    }

    pub(super) fn peer_connected(&mut self, now: Now, host: HostId) {
        match self.membership.standing(host, now.unix_s) {
            Standing::Member(_) => {
                self.peers.insert(host, Bucket::new(GOSSIP, now.steady));
                let have = Gossip::Have(self.have());
                self.act(Action::Gossip(host, have));
            }
            // Nothing new is connected under a ruleset that has ended.
            Standing::Expired(_) => self.act(Action::Cut(host, Why::Ended)),
            Standing::Stranger(why) => self.act(Action::Cut(host, why)),
        }
    }

    /// Tells connected hosts what this one has.
    fn tell_peers(&mut self) {
        let have = self.have();
        let peers: Vec<HostId> = self.peers.keys().copied().collect();
        for host in peers {
            self.act(Action::Gossip(host, Gossip::Have(have)));
        }
    }

    pub(super) fn gossip(&mut self, now: Now, host: HostId, gossip: Gossip) {
        // Hosts that are cut are not in the list.
        let Some(bucket) = self.peers.get_mut(&host) else {
            return;
        };
        if !bucket.take(1, now.steady) {
            return;
        }
        match gossip {
            Gossip::Have(theirs) => {
                let ours = self.have();
                if theirs.realm != ours.realm {
                    return;
                }
                if theirs.version > ours.version {
                    self.act(Action::Gossip(host, Gossip::Have(ours)));
                } else if theirs.version < ours.version
                    && let Some(ruleset) = self.membership.verified()
                {
                    let ruleset = Gossip::Ruleset(ruleset.signed().clone());
                    self.act(Action::Gossip(host, ruleset));
                }
                if theirs.enrolments != ours.enrolments {
                    let enrolments = self.membership.enrolments();
                    let enrolments = enrolments.map(|one| one.enrolment().clone()).collect();
                    self.act(Action::Gossip(host, Gossip::Enrolments(enrolments)));
                }
            }
            Gossip::Ruleset(ruleset) => self.ruleset(host, &ruleset),
            Gossip::Enrolments(enrolments) => self.enrolments(now, host, &enrolments),
            Gossip::Signal(bytes) => self.act(Action::Signal(host, bytes)),
        }
    }
}
