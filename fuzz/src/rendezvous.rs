//! Fuzzes what hosts, servers and strangers may send in a realm: messages, rulesets, tokens,
//! enrolments and relayed datagrams. The result is something that encodes to the same, or an error.

use longhaul_realm::membership::Membership;
use longhaul_realm::protocol::{Broker, Gossip, ToHost, ToServer};
use longhaul_realm::relay;
use longhaul_realm::token::Token;
use longhaul_realm::wire::{Message, decode, encode};
use std::fmt::Debug;

/// Decodes `data` as each kind of message, as a relayed datagram, and as the text of a token.
pub(crate) fn run(data: &[u8]) {
    check::<ToServer>(data);
    check::<ToHost>(data);
    check::<Broker>(data);
    check::<Gossip>(data);
    judge(data);
    if let Ok((session, payload)) = relay::parse(data) {
        assert_eq!([&relay::header(session), payload].concat(), data);
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(token) = Token::parse(text)
    {
        let again = Token::parse(&token.to_text()).expect("what was written");
        assert_eq!(again.authorisation(), token.authorisation());
        assert_eq!(again.servers(), token.servers());
    }
}

fn check<M: Message + PartialEq + Debug>(data: &[u8]) {
    let Ok(message) = decode::<M>(data) else {
        return;
    };
    let bytes = encode(&message).expect("what was accepted keeps to the limits");
    // The encoding may be shorter: numbers can be written with more bytes than necessary.
    assert!(bytes.len() <= data.len());
    assert_eq!(decode::<M>(&bytes).as_ref(), Ok(&message));
}

/// Judges documents as a host does that has no ruleset yet.
fn judge(data: &[u8]) {
    let now_s = 1_800_000_000;
    match decode(data) {
        Ok(Gossip::Ruleset(ruleset)) => {
            let mut realm = Membership::new(ruleset.key.realm());
            if let Ok(verified) = realm.judge(&ruleset) {
                let version = realm.install(verified, now_s).version;
                assert_eq!(realm.version(), version);
            }
        }
        Ok(Gossip::Enrolments(enrolments)) => {
            for enrolment in enrolments {
                let mut realm = Membership::new(enrolment.authorisation.key.realm());
                let _ = realm.enrol(&enrolment, now_s);
                assert!(realm.members(now_s).is_empty(), "there is no ruleset");
            }
        }
        _ => {}
    }
}
