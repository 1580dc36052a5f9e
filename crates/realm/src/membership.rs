//! Owns what a host or server concludes from a ruleset and enrolments: who is a member now.
//!
//! The result depends only on what the realm's key and tokens signed, and on the wall clock. Two
//! hosts with the same documents agree, in whichever order they saw them.

use crate::enrolment::{Enrolment, EnrolmentError, TokenId, VerifiedEnrolment};
use crate::key::{RealmId, sha256};
use crate::limits::{CLOCK_TOLERANCE_S, ENROLLED_TOKENS_MAX, EXPIRED_GRACE_S};
use crate::ruleset::{NetworkId, NotNewer, Ruleset, Scope, SignedRuleset, VerifiedRuleset};
use crate::signed::DocumentError;
use longhaul_protocol::HostId;
use std::collections::BTreeMap;

/// What is known of a realm's members.
#[derive(Debug, Clone)]
pub struct Membership {
    realm: RealmId,
    ruleset: Option<VerifiedRuleset>,
    /// By token: one enrolment, or two that prove that the token was used twice.
    enrolments: BTreeMap<TokenId, Vec<VerifiedEnrolment>>,
}

/// A member, from the ruleset or by a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its identity.
    pub id: HostId,
    /// Its name in the realm.
    pub name: String,
    /// Its site.
    pub site: String,
    /// What it may do at other hosts.
    pub scope: Scope,
    /// The networks that it may have ports in.
    pub networks: Vec<NetworkId>,
    /// Whether it is a member by a token, until `confirm_s`, and in no ruleset yet.
    pub pending: bool,
}

/// What a host is in the realm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// A member.
    Member(Member),
    /// A member of a ruleset that has ended: what is connected stays, nothing new is connected.
    Expired(Member),
    /// Not a member, for this reason.
    Stranger(Why),
}

impl Standing {
    /// Returns whether the host is a member under a ruleset that has not ended.
    pub fn is_member(&self) -> bool {
        matches!(self, Self::Member(_))
    }
}

/// Why a host is not a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// Neither a ruleset nor an enrolment names it.
    #[error("the realm does not list this host")]
    Unknown,
    /// The realm removed it.
    #[error("the realm removed this host")]
    Removed,
    /// No ruleset is here yet.
    #[error("no ruleset of the realm has arrived yet")]
    NoRuleset,
    /// The ruleset ended long ago.
    #[error("the realm's ruleset has ended: sign a new version")]
    Ended,
    /// Its token was used by two hosts.
    #[error("two hosts joined with one token: neither is a member until the operator lists one")]
    TokenUsedTwice,
    /// Its token was revoked.
    #[error("the token of this host was revoked")]
    Revoked,
    /// Another host joined with its token, says the ruleset.
    #[error("another host of the realm joined with this token")]
    TokenTaken,
    /// Another host has the name.
    #[error("another host of the realm has this host's name: make a token with another one")]
    NameTaken,
    /// The time until which the token gave membership is over.
    #[error("this host joined by a token, and the operator did not list it in time")]
    Unconfirmed,
}

/// A ruleset was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The version now in force.
    pub version: u64,
    /// How far the time of its issue is ahead of this host's clock, in seconds, if it is more than
    /// [`CLOCK_TOLERANCE_S`].
    pub clock_behind_s: Option<u64>,
}

/// Why a ruleset is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesetError {
    /// It is not accepted at all.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// It does not replace the one in force.
    #[error(transparent)]
    NotNewer(#[from] NotNewer),
}

/// Why an enrolment is not kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnrolError {
    /// It is not accepted at all.
    #[error(transparent)]
    Enrolment(#[from] EnrolmentError),
    /// It enrols nobody under the ruleset in force.
    #[error("{0}")]
    Void(Why),
    /// Too many tokens wait for the operator.
    #[error(
        "{ENROLLED_TOKENS_MAX} hosts joined by tokens and are in no ruleset: sign a new version"
    )]
    Full,
}

impl Membership {
    /// Knows nobody yet.
    pub fn new(realm: RealmId) -> Self {
        Self {
            realm,
            ruleset: None,
            enrolments: BTreeMap::new(),
        }
    }

    /// Returns the realm.
    pub fn realm(&self) -> RealmId {
        self.realm
    }

    /// Returns the ruleset in force.
    pub fn ruleset(&self) -> Option<&Ruleset> {
        self.ruleset.as_ref().map(VerifiedRuleset::content)
    }

    /// Returns the ruleset in force, verified.
    pub fn verified(&self) -> Option<&VerifiedRuleset> {
        self.ruleset.as_ref()
    }

    /// Returns the version in force, or 0.
    pub fn version(&self) -> u64 {
        self.ruleset().map_or(0, |ruleset| ruleset.version)
    }

    /// Verifies a ruleset and whether it replaces the one in force. Changes nothing.
    ///
    /// A time of issue in the future does not matter: the version orders rulesets, and a host whose
    /// clock is behind must not miss a removal. Nor does an end in the past, for the same reason:
    /// it makes nobody a member.
    pub fn judge(&self, ruleset: &SignedRuleset) -> Result<VerifiedRuleset, RulesetError> {
        let verified = ruleset.verify(self.realm)?;
        verified.replaces(self.ruleset.as_ref())?;
        Ok(verified)
    }

    /// Puts a judged ruleset in force. A lower version than the one in force is ignored.
    pub fn install(&mut self, ruleset: VerifiedRuleset, unix_s: u64) -> Taken {
        let issued_s = ruleset.content().issued_s;
        if ruleset.replaces(self.ruleset.as_ref()).is_ok() {
            self.ruleset = Some(ruleset);
            self.prune(unix_s);
        }
        let ahead_s = issued_s.saturating_sub(unix_s);
        Taken {
            version: self.version(),
            clock_behind_s: (ahead_s > CLOCK_TOLERANCE_S).then_some(ahead_s),
        }
    }

    /// Verifies an enrolment and keeps it. Returns whether it is new.
    ///
    /// The second host of a token is kept too, as proof that the token was used twice: then neither
    /// is a member. A third one changes nothing.
    pub fn enrol(&mut self, enrolment: &Enrolment, unix_s: u64) -> Result<bool, EnrolError> {
        let verified = enrolment.verify(self.realm)?;
        if let Some(why) = self.void(&verified, unix_s) {
            return Err(EnrolError::Void(why));
        }
        self.prune(unix_s);
        if self.enrolments.len() >= ENROLLED_TOKENS_MAX
            && !self.enrolments.contains_key(&verified.token())
        {
            return Err(EnrolError::Full);
        }
        let of_token = self.enrolments.entry(verified.token()).or_default();
        let known = of_token.iter().any(|other| other.host() == verified.host());
        if known || of_token.len() >= 2 {
            return Ok(false);
        }
        of_token.push(verified);
        Ok(true)
    }

    /// Returns the enrolments that are not settled by the ruleset, by token.
    pub fn enrolments(&self) -> impl Iterator<Item = &VerifiedEnrolment> {
        self.enrolments.values().flatten()
    }

    /// Returns the host that used a token, if exactly one is known.
    pub fn user_of(&self, token: TokenId) -> Option<HostId> {
        match self.enrolments.get(&token).map(Vec::as_slice) {
            Some([only]) => Some(only.host()),
            _ => None,
        }
    }

    /// Returns a digest of the enrolments: two hosts with the same ones have the same digest. Which
    /// two of several users of a token are known does not matter.
    pub fn enrolments_digest(&self) -> u64 {
        let mut bytes = Vec::new();
        for (token, of_token) in &self.enrolments {
            bytes.extend(token.0);
            match of_token.as_slice() {
                [only] => bytes.extend(only.host().0),
                _ => bytes.push(2),
            }
        }
        let [a, b, c, d, e, f, g, h, ..] = sha256(&bytes);
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns what a host is now.
    pub fn standing(&self, host: HostId, unix_s: u64) -> Standing {
        let Some(ruleset) = self.ruleset() else {
            return Standing::Stranger(Why::NoRuleset);
        };
        if ruleset.is_removed(host) {
            return Standing::Stranger(Why::Removed);
        }
        let member = match ruleset.host(host) {
            Some(entry) => {
                let networks = ruleset.networks.iter();
                let in_it = networks.filter(|network| network.members.contains(&host));
                Member {
                    id: host,
                    name: entry.name.clone(),
                    site: entry.site.clone(),
                    scope: entry.scope,
                    networks: in_it.map(|network| network.id).collect(),
                    pending: false,
                }
            }
            None => match self.by_token(ruleset, host, unix_s) {
                Ok(member) => member,
                Err(why) => return Standing::Stranger(why),
            },
        };
        let end_s = ruleset.expires_s;
        if unix_s <= end_s.saturating_add(CLOCK_TOLERANCE_S) {
            Standing::Member(member)
        } else if unix_s <= end_s.saturating_add(EXPIRED_GRACE_S) {
            Standing::Expired(member)
        } else {
            Standing::Stranger(Why::Ended)
        }
    }

    /// Returns the id of the member or pending member with a name.
    pub fn by_name(&self, name: &str, unix_s: u64) -> Option<HostId> {
        let ruleset = self.ruleset()?;
        let listed = ruleset.hosts.iter().filter(|host| host.name == name);
        let pending = self
            .enrolments()
            .filter(|enrolment| enrolment.authorisation().name == name);
        let mut ids = listed
            .map(|host| host.id)
            .chain(pending.map(VerifiedEnrolment::host));
        ids.find(|id| !matches!(self.standing(*id, unix_s), Standing::Stranger(_)))
    }

    /// Returns all members now, those of the ruleset first.
    pub fn members(&self, unix_s: u64) -> Vec<Member> {
        let Some(ruleset) = self.ruleset() else {
            return Vec::new();
        };
        let listed = ruleset.hosts.iter().map(|host| host.id);
        let mut pending: Vec<HostId> = self.enrolments().map(VerifiedEnrolment::host).collect();
        pending.retain(|id| ruleset.host(*id).is_none());
        pending.sort_unstable();
        pending.dedup();
        let standing = |id| match self.standing(id, unix_s) {
            Standing::Member(member) | Standing::Expired(member) => Some(member),
            Standing::Stranger(_) => None,
        };
        listed.chain(pending).filter_map(standing).collect()
    }

    /// The reason why an enrolment is worth nothing under the ruleset in force.
    fn void(&self, enrolment: &VerifiedEnrolment, unix_s: u64) -> Option<Why> {
        let authorisation = enrolment.authorisation();
        let (host, token) = (enrolment.host(), enrolment.token());
        let confirm_s = authorisation.confirm_s;
        if unix_s > confirm_s.saturating_add(CLOCK_TOLERANCE_S) {
            return Some(Why::Unconfirmed);
        }
        let ruleset = self.ruleset()?;
        if ruleset.is_removed(host) {
            return Some(Why::Removed);
        }
        if ruleset.revoked.contains(&token) {
            return Some(Why::Revoked);
        }
        let settled = |entry: &&crate::ruleset::HostEntry| entry.token == Some(token);
        if ruleset.hosts.iter().find(settled).is_some() {
            return Some(Why::TokenTaken);
        }
        None
    }

    /// A member that is in no ruleset.
    fn by_token(&self, ruleset: &Ruleset, host: HostId, unix_s: u64) -> Result<Member, Why> {
        let mut refused = Why::Unknown;
        for of_token in self.enrolments.values() {
            let Some(enrolment) = of_token.iter().find(|enrolment| enrolment.host() == host) else {
                continue;
            };
            let authorisation = enrolment.authorisation();
            let same = |name: &str| name.eq_ignore_ascii_case(&authorisation.name);
            let others = self.enrolments().filter(|other| other.host() != host);
            let mut others = others.filter(|other| self.void(other, unix_s).is_none());
            if let Some(why) = self.void(enrolment, unix_s) {
                refused = why;
            } else if of_token.len() > 1 {
                refused = Why::TokenUsedTwice;
            } else if ruleset.hosts.iter().any(|entry| same(&entry.name))
                || others.any(|other| same(&other.authorisation().name))
            {
                refused = Why::NameTaken;
            } else {
                let known = |id: &&NetworkId| ruleset.networks.iter().any(|net| net.id == **id);
                let networks = authorisation.networks.iter().filter(known);
                return Ok(Member {
                    id: host,
                    name: authorisation.name.clone(),
                    site: authorisation.site.clone(),
                    scope: authorisation.scope,
                    networks: networks.copied().collect(),
                    pending: true,
                });
            }
        }
        Err(refused)
    }

    /// Forgets enrolments that enrol nobody any more.
    fn prune(&mut self, unix_s: u64) {
        let enrolments = std::mem::take(&mut self.enrolments);
        let lives = |of_token: &Vec<VerifiedEnrolment>| {
            of_token
                .iter()
                .any(|enrolment| self.void(enrolment, unix_s).is_none())
        };
        let kept = enrolments.into_iter().filter(|(_, some)| lives(some));
        self.enrolments = kept.collect();
    }
}

#[cfg(test)]
mod tests;
