//! Tests of rulesets, enrolments, and what follows from them.

use super::*;
use crate::key::Signature;
use crate::ruleset::{Arbiter, StoreId, Tombstone};
use crate::signed::{Signed, sign};
use crate::tests_common::{NOW_S, enrolment, host, id, key, network, ruleset, signed, token};

type Change<'a> = &'a dyn Fn(&mut Ruleset);

fn realm() -> Membership {
    Membership::new(key(1).public().realm())
}

fn with(ruleset: &Ruleset) -> Membership {
    let mut membership = realm();
    membership.install(signed(ruleset), NOW_S);
    membership
}

fn take(membership: &mut Membership, ruleset: &SignedRuleset) -> Result<u64, RulesetError> {
    let verified = membership.judge(ruleset)?;
    Ok(membership.install(verified, NOW_S).version)
}

fn why(membership: &Membership, host: u8) -> Why {
    match membership.standing(id(host), NOW_S + 20) {
        Standing::Stranger(why) => why,
        standing => panic!("{standing:?}"),
    }
}

#[test]
fn versions_only_grow() {
    let mut membership = realm();
    let three = signed(&ruleset(3, &[1, 2])).signed().clone();
    assert_eq!(take(&mut membership, &three), Ok(3));
    let error = take(&mut membership, &three).unwrap_err();
    assert_eq!(error, NotNewer::Same { version: 3 }.into());
    let older = signed(&ruleset(2, &[1, 2, 3])).signed().clone();
    let error = take(&mut membership, &older).unwrap_err();
    assert_eq!(error, NotNewer::Older { got: 2, have: 3 }.into());
    let fork = signed(&ruleset(3, &[1])).signed().clone();
    let error = take(&mut membership, &fork).unwrap_err();
    assert_eq!(error, NotNewer::Forked { version: 3 }.into());
    assert!(error.to_string().contains("sign version 4"), "{error}");
    assert_eq!(membership.members(NOW_S).len(), 2);
}

#[test]
fn what_the_realm_did_not_sign_is_refused() {
    let membership = realm();
    let good = signed(&ruleset(1, &[1])).signed().clone();
    let mut foreign = ruleset(1, &[1]);
    foreign.realm = key(2).public().realm();
    let foreign = sign(&foreign, &key(2)).unwrap().signed().clone();
    let error = membership.judge(&foreign).unwrap_err();
    assert!(error.to_string().contains("realm"), "{error}");
    // The realm's key with another realm's content cannot be signed at all.
    assert!(sign(&ruleset(1, &[1]), &key(2)).is_err());
    for position in [0, 1, good.bytes.len() - 1] {
        let mut changed = good.clone();
        changed.bytes[position] ^= 1;
        let error = membership.judge(&changed).unwrap_err();
        assert!(error.to_string().contains("signature"), "{error}");
    }
    let mut unsigned: Signed<Ruleset> = good.clone();
    unsigned.signature = Signature([[0; 32]; 2]);
    assert!(membership.judge(&unsigned).is_err());
    assert!(membership.judge(&good).is_ok());
}

#[test]
fn contradictions_are_refused_with_their_reason() {
    let refused = |change: &dyn Fn(&mut Ruleset)| {
        let mut ruleset = ruleset(1, &[1, 2]);
        change(&mut ruleset);
        sign(&ruleset, &key(1)).unwrap_err().to_string()
    };
    let cases: [(&str, Change); 13] = [
        ("two hosts have the name", &|r| {
            r.hosts[1].name = "HOST-1".to_owned();
        }),
        ("listed twice", &|r| r.hosts[1].id = id(1)),
        ("two networks have the name", &|r| {
            r.networks.push(network(2, &[1]));
            r.networks[1].name = "net-1".to_owned();
        }),
        ("is used twice", &|r| {
            r.networks.push(network(1, &[1]));
            r.networks[1].name = "other".to_owned();
        }),
        ("no host of the realm", &|r| {
            r.networks[0].members.push(id(9));
        }),
        ("lists a member twice", &|r| {
            r.networks[0].members.push(id(1));
        }),
        ("listed and removed", &|r| {
            r.removed.push(Tombstone {
                id: id(1),
                removed_s: NOW_S,
            });
        }),
        ("not a name", &|r| r.hosts[0].name = "a/b".to_owned()),
        ("at least 1", &|r| r.version = 0),
        ("ends after its issue", &|r| r.expires_s = r.issued_s),
        ("the arbiter is none", &|r| {
            r.arbiter = Some(Arbiter {
                server: id(1),
                store: StoreId([1; 16]),
            });
        }),
        ("not the address", &|r| {
            r.servers[0].addresses[0] = "nowhere".to_owned();
        }),
        ("MTU", &|r| r.networks[0].mtu = 60),
    ];
    for (reason, change) in cases {
        let error = refused(change);
        assert!(error.contains(reason), "{reason}: {error}");
    }
}

#[test]
fn a_clock_that_is_behind_is_reported_and_misses_no_removal() {
    let mut membership = with(&ruleset(1, &[1, 2]));
    let mut later = ruleset(2, &[1]);
    later.issued_s = NOW_S + 7200;
    let verified = membership.judge(signed(&later).signed()).unwrap();
    let taken = membership.install(verified, NOW_S);
    assert_eq!(taken.clock_behind_s, Some(7200));
    assert_eq!(why(&membership, 2), Why::Unknown);
}

#[test]
fn an_ended_ruleset_keeps_what_is_connected_for_a_day() {
    let membership = with(&ruleset(1, &[1]));
    let end_s = NOW_S + 30 * 86_400;
    let at = |unix_s| membership.standing(id(1), unix_s);
    assert!(matches!(at(end_s + 300), Standing::Member(_)));
    assert!(matches!(at(end_s + 301), Standing::Expired(_)));
    assert!(matches!(at(end_s + 86_400), Standing::Expired(_)));
    assert_eq!(at(end_s + 86_401), Standing::Stranger(Why::Ended));
}

#[test]
fn a_token_makes_one_host_a_member_until_the_ruleset_lists_it() {
    let mut membership = with(&ruleset(1, &[1]));
    assert_eq!(membership.enrol(&enrolment(9, 50), NOW_S), Ok(true));
    assert_eq!(membership.enrol(&enrolment(9, 50), NOW_S), Ok(false));
    let Standing::Member(member) = membership.standing(id(50), NOW_S) else {
        panic!("not a member");
    };
    assert!(member.pending && member.name == "host-9" && member.site == "oslo");
    assert_eq!(member.networks, [crate::ruleset::NetworkId([1; 8])]);
    assert_eq!(membership.by_name("host-9", NOW_S), Some(id(50)));
    let confirm_s = token(9).content().confirm_s;
    let late = membership.standing(id(50), confirm_s + 301);
    assert_eq!(late, Standing::Stranger(Why::Unconfirmed));

    let mut listed = ruleset(2, &[1, 50]);
    listed.hosts[1].token = Some(TokenId([9; 16]));
    membership.install(signed(&listed), NOW_S);
    assert_eq!(membership.enrolments().count(), 0);
    let error = membership.enrol(&enrolment(9, 51), NOW_S).unwrap_err();
    assert_eq!(error, EnrolError::Void(Why::TokenTaken));
}

#[test]
fn a_token_that_two_hosts_used_makes_neither_a_member_in_any_order() {
    let orders = [[50, 51, 52], [52, 51, 50]];
    let digests = orders.map(|order| {
        let mut membership = with(&ruleset(1, &[1]));
        for host in order {
            let _ = membership.enrol(&enrolment(9, host), NOW_S);
        }
        assert_eq!(why(&membership, order[0]), Why::TokenUsedTwice);
        assert_eq!(why(&membership, order[1]), Why::TokenUsedTwice);
        membership.enrolments_digest()
    });
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn an_enrolment_cannot_be_invented_or_redirected() {
    let mut membership = with(&ruleset(1, &[1]));
    let mut redirected = enrolment(9, 50);
    redirected.host = id(66);
    let error = membership.enrol(&redirected, NOW_S).unwrap_err();
    assert_eq!(error, EnrolError::Enrolment(EnrolmentError::Signature));
    // A token whose one-time key is the attacker's: the realm's signature breaks.
    let own = Enrolment::new(&token(9), &key(66), id(66), NOW_S);
    assert!(membership.enrol(&own, NOW_S).is_err());
    let late = Enrolment::new(&token(9), &key(9), id(50), NOW_S + 86_401);
    let error = membership.enrol(&late, NOW_S).unwrap_err();
    assert!(matches!(
        error,
        EnrolError::Enrolment(EnrolmentError::Late { .. })
    ));
}

#[test]
fn removed_hosts_and_revoked_tokens_stay_out() {
    let mut membership = with(&ruleset(1, &[1]));
    membership.enrol(&enrolment(9, 50), NOW_S).unwrap();
    let mut next = ruleset(2, &[1]);
    next.removed = vec![Tombstone {
        id: id(50),
        removed_s: NOW_S,
    }];
    membership.install(signed(&next), NOW_S);
    assert_eq!(why(&membership, 50), Why::Removed);
    let error = membership.enrol(&enrolment(9, 50), NOW_S).unwrap_err();
    assert_eq!(error, EnrolError::Void(Why::Removed));
    next.version = 3;
    next.revoked = vec![TokenId([8; 16])];
    membership.install(signed(&next), NOW_S);
    let error = membership.enrol(&enrolment(8, 60), NOW_S).unwrap_err();
    assert_eq!(error, EnrolError::Void(Why::Revoked));
}

#[test]
fn one_name_has_one_host() {
    let mut membership = with(&ruleset(1, &[9]));
    membership.enrol(&enrolment(9, 50), NOW_S).unwrap();
    assert_eq!(why(&membership, 50), Why::NameTaken);
    assert_eq!(membership.by_name("host-9", NOW_S), Some(id(9)));
}

#[test]
fn an_operator_is_warned_of_what_a_new_version_breaks() {
    let mut old = ruleset(4, &[1, 2]);
    old.hosts[1].token = Some(TokenId([2; 16]));
    old.arbiter = Some(Arbiter {
        server: id(200),
        store: StoreId([1; 16]),
    });
    let mut new = ruleset(4, &[1]);
    new.arbiter = Some(Arbiter {
        server: id(200),
        store: StoreId([2; 16]),
    });
    let warnings = new.warnings_after(&old).join("\n");
    for word in ["does not replace", "old arbiter", "no tombstone"] {
        assert!(warnings.contains(word), "{warnings}");
    }
    new.version = 5;
    new.hosts.push(host(2));
    new.arbiter = old.arbiter;
    assert!(new.warnings_after(&old).is_empty());
}
